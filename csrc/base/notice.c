/* The notice queue: what the library has to say, kept until a face logs it. A queue rather than a callback, so that no
 * foreign code ever runs inside a decision (under a lock, or without Python's). */
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#define NOTICES_MAX 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint waiting; /* written under the lock, read without it */
static tg_notice queue[NOTICES_MAX];
static unsigned first, dropped;

/* A child made while another thread held the lock would wait for ever: it begins with an empty queue of its own. What the
 * parent had queued, the parent logs. */
static void
begin_child(void)
{
    pthread_mutex_init(&lock, NULL);
    atomic_store(&waiting, 0);
    first = dropped = 0;
}

static void
register_child(void)
{
    pthread_atfork(NULL, NULL, begin_child);
}

void
tg__notice(const char *code, const char *format, ...)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_child);
    tg_notice notice;
    snprintf(notice.code, sizeof notice.code, "%s", code);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(notice.message, sizeof notice.message, format, arguments);
    va_end(arguments);

    pthread_mutex_lock(&lock);
    unsigned count = atomic_load(&waiting);
    if (count == NOTICES_MAX) {
        first = (first + 1) % NOTICES_MAX;
        count--;
        dropped++;
    }
    queue[(first + count) % NOTICES_MAX] = notice;
    atomic_store(&waiting, count + 1);
    pthread_mutex_unlock(&lock);
}

bool
tg_notice_pending(void)
{
    return atomic_load_explicit(&waiting, memory_order_relaxed) != 0;
}

bool
tg_notice_take(tg_notice *notice)
{
    pthread_mutex_lock(&lock);
    const unsigned count = atomic_load(&waiting);
    if (count > 0) {
        *notice = queue[first];
        first = (first + 1) % NOTICES_MAX;
        atomic_store(&waiting, count - 1);
        if (dropped) {
            const size_t used = strlen(notice->message);
            snprintf(notice->message + used, sizeof notice->message - used, " (%u earlier notices were dropped)",
                     dropped);
            dropped = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return count > 0;
}
