/* Which requests a policy speaks of: patterns with '*', compiled when the file is read, compared in linear time.
 * Must not enter: YAML, what a policy does. */
#ifndef TG_MATCH_H
#define TG_MATCH_H

#include "config/config_arena.h"

/* A pattern: pieces of text with any run of bytes between them. One piece: no '*'. */
typedef struct tg_pattern {
    const tg_text *pieces;
    size_t piece_count;
    bool below; /* a path that ends in "/" and '*': meets the folder itself too */
} tg_pattern;

struct tg_match {
    tg_pattern *paths, *hosts;
    tg_text *methods; /* each list empty: any */
    size_t path_count, host_count, method_count;
};

/* Compile one written pattern. The spelling is that of requests: paths decoded, folded, without a '/' at the end;
 * hosts in lower case. `fault` tells what is wrong with it, NULL when nothing is. false: out of memory. */
bool tg__pattern_path(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
bool tg__pattern_host(tg_arena *arena, tg_text written, tg_pattern *pattern, const char **fault);
bool tg__pattern_meets(const tg_pattern *pattern, tg_text text);

#endif
