/* What a client wishes of a loop, noted for a test that moves it by hand. HAND_LOOP_FDS comes before it: as many descriptors
 * as the client may have watched at once. Must not enter: when it is moved, and which client it is. */
#ifndef TG_TEST_HAND_LOOP_H
#define TG_TEST_HAND_LOOP_H

#include <poll.h>

static struct {
    struct pollfd fds[HAND_LOOP_FDS];
    nfds_t fd_count;
    uint64_t wakes_at_us;
    bool flushes;
} loop;

static inline void
on_watch(void *unused, int fd, bool readable, bool writable)
{
    (void)unused;
    nfds_t i = 0;
    while (i < loop.fd_count && loop.fds[i].fd != fd)
        i++;
    if (!readable && !writable) {
        assert_true(i < loop.fd_count);
        loop.fds[i] = loop.fds[--loop.fd_count];
        return;
    }
    assert_true(i < HAND_LOOP_FDS);
    loop.fds[i] = (struct pollfd){ .fd = fd, .events = (short)((readable ? POLLIN : 0) | (writable ? POLLOUT : 0)) };
    if (i == loop.fd_count)
        loop.fd_count++;
}

static inline void
on_wake(void *unused, uint64_t in_us)
{
    (void)unused;
    loop.wakes_at_us = in_us == UINT64_MAX ? UINT64_MAX : tg__monotonic_us() + in_us;
}

static inline void
on_flush(void *unused)
{
    (void)unused;
    loop.flushes = true;
}

static inline tg_async_loop
hand_loop(void)
{
    memset(&loop, 0, sizeof loop);
    loop.wakes_at_us = UINT64_MAX;
    return (tg_async_loop){ NULL, on_watch, on_wake, on_flush };
}

#endif
