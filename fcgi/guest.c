/* A client of a remote store on the loop: see guest.h. */
#include "guest.h"

#include "loop_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

/* Freed at the end of the round: an event of this round may still point here. */
struct fcgi_guest_source {
    source source;
    int fd; /* -1: forgotten */
    uint32_t interest;
    fcgi_guest_source *next;
};

static void
forget_source(fcgi_loop *loop, fcgi_guest_source *from)
{
    fcgi_guest_source **link = &loop->guest.sources;
    while (*link != from)
        link = &(*link)->next;
    *link = from->next;
    /* The descriptor is closed next, and another process may hold a copy: epoll would tell of it for ever. */
    epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, from->fd, NULL);
    from->fd = -1;
    from->next = loop->guest.dead;
    loop->guest.dead = from;
}

static void
watch(void *data, int fd, bool readable, bool writable)
{
    fcgi_loop *loop = data;
    const uint32_t interest = (readable ? EPOLLIN : 0) | (writable ? EPOLLOUT : 0);
    fcgi_guest_source *from = loop->guest.sources;
    while (from && from->fd != fd)
        from = from->next;
    if (interest == 0) {
        if (from)
            forget_source(loop, from);
        return;
    }
    if (from && from->interest == interest)
        return;
    const bool known = from != NULL;
    if (!known) {
        from = calloc(1, sizeof *from);
        if (!from) {
            fcgi_log(FCGI_ERROR, "epoll", "out of memory"); /* its calls end by their deadlines */
            return;
        }
        from->source.kind = SOURCE_GUEST;
        from->fd = fd;
        from->next = loop->guest.sources;
        loop->guest.sources = from;
    }
    from->interest = interest;
    struct epoll_event event = { .events = interest, .data.ptr = &from->source };
    if (epoll_ctl(loop->epoll_fd, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) == -1)
        fcgi_log(FCGI_ERROR, "epoll", "%s", strerror(errno)); /* likewise */
}

static void
wake(void *data, uint64_t in_us)
{
    fcgi_loop *loop = data;
    /* From now, not from this round's beginning: a round may have taken its time. */
    loop->guest.wake_at_us = in_us == UINT64_MAX ? 0 : fcgi_loop_clock_us() + in_us;
}

static void
flush(void *data)
{
    ((fcgi_loop *)data)->guest.flushes = true;
}

void
fcgi_loop_house(fcgi_loop *loop, tg_async_loop *hooks)
{
    *hooks = (tg_async_loop){ .data = loop, .watch = watch, .wake = wake, .flush = flush };
}

void
fcgi_guest_handle(fcgi_loop *loop, fcgi_guest_source *from, uint32_t events)
{
    if (from->fd == -1)
        return;
    const bool broken = (events & (EPOLLERR | EPOLLHUP)) != 0; /* reading and writing both say how */
    loop->responder.guest_ready(loop->responder.context, from->fd, broken || (events & EPOLLIN),
                                (broken && (from->interest & EPOLLOUT)) || (events & EPOLLOUT));
}

void
fcgi_guest_expire(fcgi_loop *loop)
{
    if (loop->guest.wake_at_us == 0 || loop->guest.wake_at_us > loop->now_us)
        return;
    loop->guest.wake_at_us = 0;
    loop->responder.guest_wake(loop->responder.context);
}

bool
fcgi_guest_flush(fcgi_loop *loop)
{
    if (!loop->guest.flushes)
        return false;
    loop->guest.flushes = false;
    loop->responder.guest_flush(loop->responder.context);
    return true;
}

uint64_t
fcgi_guest_next_us(const fcgi_loop *loop)
{
    return loop->guest.wake_at_us ? loop->guest.wake_at_us : NEVER_US;
}

void
fcgi_guest_bury(fcgi_loop *loop)
{
    while (loop->guest.dead) {
        fcgi_guest_source *next = loop->guest.dead->next;
        free(loop->guest.dead);
        loop->guest.dead = next;
    }
}

void
fcgi_guest_fini(fcgi_loop *loop)
{
    while (loop->guest.sources)
        forget_source(loop, loop->guest.sources);
    fcgi_guest_bury(loop);
}
