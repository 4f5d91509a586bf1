/* JSON for people's tools, written piece by piece into a sink.
 * Must not enter: reading, and anything a request waits for. */
#ifndef TG_JSON_H
#define TG_JSON_H

#include "base/base.h"

typedef struct tg_json {
    tg_sink *sink;
    void *context;
    unsigned depth;
    bool filled; /* the innermost list or object has an entry */
} tg_json;

/* `key` is NULL inside a list and for the outermost value. Two spaces a level, so that it can be read as it is. */
void tg__json_open(tg_json *json, const char *key, char bracket);
void tg__json_close(tg_json *json, char bracket); /* after the outermost: a line end */
void tg__json_text(tg_json *json, const char *key, tg_text value); /* bytes outside ASCII as Latin-1: always valid */
void tg__json_number(tg_json *json, const char *key, uint64_t value);
void tg__json_flag(tg_json *json, const char *key, bool value);
void tg__json_null(tg_json *json, const char *key);
/* TG_NEVER is null. */
void tg__json_wait(tg_json *json, const char *key, uint64_t wait_us);

#endif
