/* The waiting side of a segment's lock, and how a holder is judged: running, stopped, dead, or out of sight. */
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PID_BITS 22
#define START_LOW_BITS 9
#define START_HIGH_BITS 11
#define NAMESPACE_BITS 21
#define MASK(bits) ((UINT64_C(1) << (bits)) - 1)

#define SPINS 64             /* a holder is in for some 100 ns: longer than this it is not running */
#define SLICE_US 1000        /* a dead holder is noticed after one slice */
#define LOOK_AGAIN_US 50000  /* behind a stopped holder: how often one caller looks whether it died */
#define HIDDEN_STALL_US UINT64_C(1000000)
#define GIVE_UP_US UINT64_C(60000000)
#define WAIT_MAX_US UINT64_C(2000000)

TG_EACH_REQUEST uint64_t
tg__boot_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* ---- who we are ---- */

/* The page is wiped in every forked child, whichever way it was forked (pthread_atfork knows only fork(3)). */
_Atomic(_Atomic uint64_t *) tg__lock_self_word; /* *word is 0: find out */
static pthread_once_t self_once = PTHREAD_ONCE_INIT;

/* Reads /proc/PID/stat ("self" for pid 0). The name in brackets may hold anything, so fields are counted from its
 * end. */
static bool
process_stat(pid_t pid, char *state, unsigned long *threads, uint64_t *start_ticks)
{
    char path[40], text[1024];
    if (pid == 0)
        snprintf(path, sizeof path, "/proc/self/stat");
    else
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd == -1)
        return false;
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    const char *at = strrchr(text, ')');
    if (!at || at[1] != ' ')
        return false;
    unsigned long long start = 0;
    const int found = sscanf(at + 2,
                             "%c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lu %*s %llu",
                             state, threads, &start);
    *start_ticks = start;
    return found == 3;
}

static uint64_t
namespace_hash(void)
{
    struct stat found;
    if (stat("/proc/self/ns/pid", &found) != 0)
        return 0;
    const uint64_t hash = (uint64_t)found.st_ino * UINT64_C(0x9e3779b97f4a7c15) >> (64 - NAMESPACE_BITS);
    return hash ? hash : 1;
}

static uint64_t
start_bits(uint64_t start_ticks)
{
    const uint64_t bits = start_ticks & MASK(START_LOW_BITS + START_HIGH_BITS);
    return bits ? bits : 1; /* 0 stands for not known */
}

static uint64_t
self_find(void)
{
    char state;
    unsigned long threads;
    uint64_t ticks, start = 0;
    if (process_stat(0, &state, &threads, &ticks))
        start = start_bits(ticks);
    return ((uint64_t)getpid() & MASK(PID_BITS)) | (start & MASK(START_LOW_BITS)) << PID_BITS |
           (start >> START_LOW_BITS) << 32 | namespace_hash() << 43;
}

static void
self_prepare(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    void *memory = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return;
    if (madvise(memory, (size_t)page, MADV_WIPEONFORK) != 0) {
        munmap(memory, (size_t)page); /* A kernel before 4.14: found out anew at each hit, slow but right. */
        return;
    }
    atomic_store_explicit(&tg__lock_self_word, memory, memory_order_release);
}

uint64_t
tg__lock_self_find(void)
{
    pthread_once(&self_once, self_prepare);
    _Atomic uint64_t *const word = atomic_load_explicit(&tg__lock_self_word, memory_order_acquire);
    const uint64_t self = self_find();
    if (word)
        atomic_store_explicit(word, self, memory_order_relaxed);
    return self;
}

/* ---- judging a holder ---- */

typedef enum holder { HOLDER_RUNS, HOLDER_STOPPED, HOLDER_DEAD, HOLDER_HIDDEN } holder;

static holder
holder_look(uint64_t word, uint64_t self)
{
    if (word >> 43 == 0 || word >> 43 != self >> 43)
        return HOLDER_HIDDEN; /* its number means another process here, or none */
    const pid_t pid = (pid_t)(word & MASK(PID_BITS));
    if (pid == 0)
        return HOLDER_DEAD; /* no process writes this: the word is damaged */
    const uint64_t start =
        (word >> PID_BITS & MASK(START_LOW_BITS)) | (word >> 32 & MASK(START_HIGH_BITS)) << START_LOW_BITS;
    char state;
    unsigned long threads;
    uint64_t ticks;
    if (!process_stat(pid, &state, &threads, &ticks))
        return kill(pid, 0) == -1 && errno == ESRCH ? HOLDER_DEAD : HOLDER_HIDDEN; /* hidepid hides the living */
    if (start != 0 && start != start_bits(ticks))
        return HOLDER_DEAD;
    switch (state) {
    case 'Z':
    case 'X':
    case 'x':
        /* A first thread that ended alone shows as a zombie while the others run on. */
        return threads > 1 ? HOLDER_RUNS : HOLDER_DEAD;
    case 'T':
    case 't':
        return HOLDER_STOPPED;
    default:
        return HOLDER_RUNS;
    }
}

/* ---- waiting ---- */

static uint32_t *
futex_of(tg_segment *segment)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return (uint32_t *)&segment->lock;
#else
    return (uint32_t *)&segment->lock + 1;
#endif
}

void
tg__lock_wake(tg_segment *segment)
{
    /* Not FUTEX_PRIVATE: the waiter may be in another process. */
    syscall(SYS_futex, futex_of(segment), FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void
sleep_until_freed(tg_segment *segment, uint64_t word)
{
    const struct timespec slice = { .tv_sec = 0, .tv_nsec = SLICE_US * 1000 };
    syscall(SYS_futex, futex_of(segment), FUTEX_WAIT, (uint32_t)word, &slice, NULL, 0);
}

static void
pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* From the very word that was judged: two that find the same death cannot both take over. */
static bool
inherit(tg_segment *segment, uint64_t word, uint64_t self)
{
    return atomic_compare_exchange_strong_explicit(&segment->lock, &word, self | TG_LOCK_WAITERS, memory_order_acquire,
                                                   memory_order_relaxed);
}

static bool
spin(tg_segment *segment, uint64_t self)
{
    for (int i = 0; i < SPINS; i++) {
        uint64_t free = 0;
        if (atomic_load_explicit(&segment->lock, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_weak_explicit(&segment->lock, &free, self, memory_order_acquire,
                                                  memory_order_relaxed))
            return true;
        pause_briefly();
    }
    return false;
}

/* Tells others not to wait behind this holder. The first mark's time stays: from it the giving up is counted. */
static void
mark_stalled(tg_segment *segment, uint64_t generation, uint64_t now_us)
{
    if (atomic_load_explicit(&segment->stalled, memory_order_relaxed) == generation + 1)
        return;
    atomic_store_explicit(&segment->stalled_at_us, now_us, memory_order_relaxed);
    atomic_store_explicit(&segment->stalled, generation + 1, memory_order_relaxed);
}

/* Whether this caller may look at a holder that is marked as stalled: one of them every now and then. */
static bool
may_look(uint64_t now_us)
{
    static _Atomic uint64_t next_us;
    const uint64_t due_us = atomic_load_explicit(&next_us, memory_order_relaxed);
    if (now_us < due_us && due_us - now_us <= LOOK_AGAIN_US)
        return false;
    atomic_store_explicit(&next_us, now_us + LOOK_AGAIN_US, memory_order_relaxed);
    return true;
}

tg_lock_outcome
tg__lock_wait(tg_segment *segment, uint64_t self, uint64_t timeout_us)
{
    if (spin(segment, self))
        return TG_LOCK_TAKEN;
    const uint64_t begun_us = tg__boot_now_us();
    uint64_t now_us = begun_us, moved_us = begun_us, wait_max_us = WAIT_MAX_US;
    uint64_t seen_word = 0, seen_generation = 0;
    bool first = true;
    for (;;) {
        uint64_t word = atomic_load_explicit(&segment->lock, memory_order_relaxed);
        if (word == 0) {
            if (atomic_compare_exchange_weak_explicit(&segment->lock, &word, self | TG_LOCK_WAITERS,
                                                      memory_order_acquire, memory_order_relaxed))
                return TG_LOCK_TAKEN;
            continue;
        }
        const uint64_t generation = atomic_load_explicit(&segment->generation, memory_order_relaxed);
        const bool moved = (word & ~TG_LOCK_WAITERS) != seen_word || generation != seen_generation;
        const bool stalled = moved && atomic_load_explicit(&segment->stalled, memory_order_relaxed) == generation + 1;
        if (moved) {
            seen_word = word & ~TG_LOCK_WAITERS;
            seen_generation = generation;
            moved_us = now_us;
        }
        if (stalled && !may_look(now_us))
            return TG_LOCK_TIMEOUT;
        if (stalled || (!moved && !first)) {
            const holder found = holder_look(word, self);
            const uint64_t since_us = atomic_load_explicit(&segment->stalled_at_us, memory_order_relaxed);
            /* A stopped holder is seen to be alive and is never given up. One out of sight may have died; one that
             * runs and has not moved for a minute has become another program (exec keeps number and start time) or
             * was frozen. */
            const bool given_up =
                stalled && found != HOLDER_STOPPED && (since_us > now_us || now_us - since_us >= GIVE_UP_US);
            if (found == HOLDER_DEAD || given_up) {
                if (inherit(segment, word, self))
                    return TG_LOCK_INHERITED;
                continue;
            }
            if (stalled && found != HOLDER_RUNS)
                return TG_LOCK_TIMEOUT;
            if (stalled)
                wait_max_us = 2 * SLICE_US; /* perhaps it has just been let go on */
            const uint64_t still_us = now_us - moved_us;
            if ((found == HOLDER_STOPPED && still_us >= timeout_us) ||
                (found == HOLDER_HIDDEN && still_us >= HIDDEN_STALL_US)) {
                mark_stalled(segment, generation, now_us);
                return TG_LOCK_TIMEOUT;
            }
        }
        if (now_us - begun_us >= wait_max_us) {
            if (now_us - moved_us >= wait_max_us)
                mark_stalled(segment, generation, now_us);
            return TG_LOCK_TIMEOUT;
        }
        if (!(word & TG_LOCK_WAITERS)) {
            if (!atomic_compare_exchange_weak_explicit(&segment->lock, &word, word | TG_LOCK_WAITERS,
                                                       memory_order_relaxed, memory_order_relaxed))
                continue;
            word |= TG_LOCK_WAITERS;
        }
        sleep_until_freed(segment, word);
        first = false;
        now_us = tg__boot_now_us();
        /* The lock is anybody's who comes: without spinning again a thread that seldom runs, of very many, could
         * find it taken each time. Taken with the waiters' bit: others may sleep behind it, and the wake-up was for
         * us alone. */
        if (spin(segment, self | TG_LOCK_WAITERS))
            return TG_LOCK_TAKEN;
    }
}
