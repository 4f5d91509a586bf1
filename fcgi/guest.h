/* A client of a remote store on the loop: its descriptors in epoll, its timer, its end of round. Must not enter: what it
 * asks. */
#ifndef TIDEGATE_FCGI_GUEST_H
#define TIDEGATE_FCGI_GUEST_H

#include "tidegate.h"

typedef struct fcgi_guest_source fcgi_guest_source;

/* A loop's part of it. */
typedef struct fcgi_guest {
    fcgi_guest_source *sources, *dead;
    uint64_t wake_at_us; /* 0: not at all */
    bool flushes;
} fcgi_guest;

struct fcgi_loop;
void fcgi_guest_handle(struct fcgi_loop *loop, fcgi_guest_source *from, uint32_t events);
/* Its timer, and what it has gathered. */
void fcgi_guest_expire(struct fcgi_loop *loop);
bool fcgi_guest_flush(struct fcgi_loop *loop); /* false: there was nothing */
uint64_t fcgi_guest_next_us(const struct fcgi_loop *loop); /* UINT64_MAX: nothing is due */
void fcgi_guest_bury(struct fcgi_loop *loop);
void fcgi_guest_fini(struct fcgi_loop *loop);

#endif
