/* Memory that is given back all at once: what a rules file is held in.
 * Must not enter: what is kept there. */
#ifndef TG_CONFIG_ARENA_H
#define TG_CONFIG_ARENA_H

#include "base/base.h"

typedef struct tg_arena {
    struct tg_arena_block *blocks;
} tg_arena;

/* Zeroed, aligned for anything. NULL: out of memory. */
void *tg__arena_take(tg_arena *arena, size_t bytes);
/* A copy with a NUL behind it. */
char *tg__arena_copy(tg_arena *arena, tg_text text);
void tg__arena_free(tg_arena *arena);

#endif
