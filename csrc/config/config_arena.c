/* Memory that is given back all at once. */
#include "config/config_arena.h"

#include <stdalign.h>
#include <stdlib.h>

enum { BLOCK_BYTES = 8192 };

struct tg_arena_block {
    struct tg_arena_block *next;
    size_t used, size;
    alignas(max_align_t) char bytes[];
};

void *
tg__arena_take(tg_arena *arena, size_t bytes)
{
    struct tg_arena_block *block = arena->blocks;
    const size_t unit = alignof(max_align_t);
    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = (bytes + unit - 1) / unit * unit;
    if (!block || block->size - block->used < bytes) {
        const size_t size = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        block = calloc(1, sizeof *block + size);
        if (!block)
            return NULL;
        *block = (struct tg_arena_block){ .next = arena->blocks, .size = size };
        arena->blocks = block;
    }
    void *taken = block->bytes + block->used;
    block->used += bytes;
    return taken;
}

char *
tg__arena_copy(tg_arena *arena, tg_text text)
{
    char *copy = tg__arena_take(arena, text.length + 1);
    if (copy && text.length)
        memcpy(copy, text.data, text.length);
    return copy;
}

void
tg__arena_free(tg_arena *arena)
{
    while (arena->blocks) {
        struct tg_arena_block *block = arena->blocks;
        arena->blocks = block->next;
        free(block);
    }
}
