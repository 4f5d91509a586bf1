/* Which requests a policy speaks of: patterns with '*', compiled when the file is read, compared in linear time.
 * Must not enter: YAML, what a policy does. */
#ifndef TG_MATCH_H
#define TG_MATCH_H

#include "config/config_arena.h"
#include "identity/headers.h"

/* A pattern: pieces of text with any run of bytes between them. One piece: no '*'.
 * With `segments` what lies between them is one segment of a path, "{id}"; only behind the last may stand a '*'. */
typedef struct tg_pattern {
    const tg_text *pieces;
    size_t piece_count;
    bool segments;
    bool open;  /* with `segments`: anything may follow */
    bool below; /* a path that ends in "/" and '*': meets the folder itself too */
} tg_pattern;

/* A header and the values of which it must have one. */
typedef struct tg_match_header {
    tg_header_name name;
    tg_pattern *values; /* in lower case */
    size_t value_count;
} tg_match_header;

struct tg_match {
    tg_pattern *paths, *hosts, *routes;
    tg_text *methods; /* each list empty: any */
    tg_match_header *headers; /* all must be met */
    size_t path_count, host_count, route_count, method_count, header_count;
};

/* Compile one written pattern. The spelling is that of requests: paths decoded, folded, without a '/' at the end;
 * hosts in lower case. `fault` tells what is wrong with it, NULL when nothing is. false: out of memory. */
bool tg__pattern_path(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
bool tg__pattern_host(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
/* A route's template, as the framework writes it: '{' and '<' are letters like any other. */
bool tg__pattern_route(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
/* A header's value; letters in any case. */
bool tg__pattern_value(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
bool tg__pattern_meets(const tg_pattern *pattern, tg_text text);

#endif
