/* Memory that is given back all at once. */
#include "config/config_arena.h"

#include <stdalign.h>
#include <stdlib.h>

enum { BLOCK_BYTES = 8192, BLOCK_BYTES_MAX = 256 * 1024 };

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
        /* Each twice as large as the one before: a large file is not a hundred calls to the system. */
        const size_t next = !block ? BLOCK_BYTES : block->size < BLOCK_BYTES_MAX ? 2 * block->size : BLOCK_BYTES_MAX;
        const size_t size = bytes > next ? bytes : next;
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
