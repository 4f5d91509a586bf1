/* Memory for a process that lives for one request: taken from the front of large pieces, never given back but with the
 * process. A page that is first touched costs a fault, 2 us where memory is virtual twice over, so pieces come with their
 * pages; and nothing is handed to the system and asked for again in between, as a general allocator does.
 * One thread. What is taken is bounded by what is read: rules of 32 MiB at most, parameters of 128 KiB.
 * Must not enter: anything but the C library's names for memory. Left out under sanitizers, which bring their own. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

enum { UNIT = 16, PIECE_BYTES = 64 * 1024 };

/* In front of each block, so that one can be made larger. */
typedef struct head {
    size_t size;
    size_t unused; /* keeps blocks aligned to UNIT */
} head;

static char *front, *end;

static void *
take(size_t alignment, size_t size)
{
    if (size > PTRDIFF_MAX - PIECE_BYTES || alignment > PIECE_BYTES) {
        errno = ENOMEM;
        return NULL;
    }
    for (;;) {
        const uintptr_t at = ((uintptr_t)front + sizeof(head) + alignment - 1) & ~(uintptr_t)(alignment - 1);
        if (front && at <= (uintptr_t)end && size <= (uintptr_t)end - at) {
            head *mine = (head *)(at - sizeof(head));
            mine->size = size;
            front = (char *)at + ((size + UNIT - 1) & ~(size_t)(UNIT - 1));
            if (front > end)
                front = end;
            return (void *)at;
        }
        const size_t more = (sizeof(head) + alignment + size + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
        char *piece = mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (piece == MAP_FAILED) {
            errno = ENOMEM;
            return NULL;
        }
        front = piece;
        end = piece + more;
    }
}

void *
malloc(size_t size)
{
    return take(UNIT, size);
}

/* Of a piece that is the system's: zeroed already, and never used before. */
void *
calloc(size_t count, size_t size)
{
    size_t all;
    if (__builtin_mul_overflow(count, size, &all)) {
        errno = ENOMEM;
        return NULL;
    }
    return take(UNIT, all);
}

void
free(void *block)
{
    (void)block;
}

void *
realloc(void *block, size_t size)
{
    const size_t before = block ? ((head *)block)[-1].size : 0;
    if (block && size <= before)
        return block;
    void *larger = take(UNIT, size);
    if (larger && before)
        memcpy(larger, block, before);
    return larger;
}

void *
aligned_alloc(size_t alignment, size_t size)
{
    return take(alignment < UNIT ? UNIT : alignment, size);
}

int
posix_memalign(void **block, size_t alignment, size_t size)
{
    void *taken = take(alignment < UNIT ? UNIT : alignment, size);
    if (!taken)
        return ENOMEM;
    *block = taken;
    return 0;
}

#else
typedef int tidegate_cgi_leaves_memory_to_the_sanitizer;
#endif
