/* Opening a store by its URI, and the registry of those this process has open. */
#include "stores/store.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_URI "shared://default"
#define DEFAULT_TIMEOUT_US UINT64_C(50000)
#define TIMEOUT_US_MAX UINT64_C(2000000) /* what a waiter gives up after in any case */

/* One opening at a time, which may wait for a server; the registry is held for instants only, so that whoever closes a
 * store waits for nobody who opens one. In this order. */
static pthread_mutex_t opening_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static tg_store *registry;

static void
registry_hold(void)
{
    pthread_mutex_lock(&registry_lock);
}

static void
registry_release(void)
{
    pthread_mutex_unlock(&registry_lock);
}

/* Around a fork both are held, so that a child never sees half a change, or half a store. */
static void
hold_all(void)
{
    pthread_mutex_lock(&opening_lock);
    registry_hold();
}

static void
release_all(void)
{
    registry_release();
    pthread_mutex_unlock(&opening_lock);
}

static void
registry_begin(void)
{
    pthread_atfork(hold_all, release_all, release_all);
}

/* For messages: without what may be a password, that is all between the scheme and the last '@'. */
static const char *
show_uri(tg_text text, char *shown, size_t size)
{
    const char *at = text.length ? memrchr(text.data, '@', text.length) : NULL;
    const char *colon = text.length ? memchr(text.data, ':', text.length) : NULL;
    if (!at)
        return tg__text_show(text, shown, size);
    const size_t kept = colon && colon < at ? (size_t)(colon - text.data) + 1 : 0;
    char scheme[32], rest[96];
    tg__text_show((tg_text){ text.data, kept }, scheme, sizeof scheme);
    tg__text_show((tg_text){ at, (size_t)(text.data + text.length - at) }, rest, sizeof rest);
    snprintf(shown, size, "%s...%s", scheme, rest);
    return shown;
}

static tg_status
parse_uri(tg_text text, tg_store_uri *uri, tg_error *error)
{
    char shown[160];
    *uri = (tg_store_uri){ .option_count = 0 };
    const char *colon = text.length >= 3 ? memmem(text.data, text.length, "://", 3) : NULL;
    if (!colon)
        return tg__error(error, TG_E_CONFIG, "store '%s': expected memory://NAME, shared://NAME or redis://HOST",
                         show_uri(text, shown, sizeof shown));
    uri->scheme = (tg_text){ text.data, (size_t)(colon - text.data) };
    uri->rest = (tg_text){ colon + 3, text.length - uri->scheme.length - 3 };
    const char *question = uri->rest.length ? memchr(uri->rest.data, '?', uri->rest.length) : NULL;
    if (!question)
        return TG_OK;
    tg_text query = { question + 1, (size_t)(text.data + text.length - question - 1) };
    uri->rest.length = (size_t)(question - uri->rest.data);
    while (query.length) {
        const char *ampersand = memchr(query.data, '&', query.length);
        const tg_text item = { query.data, ampersand ? (size_t)(ampersand - query.data) : query.length };
        const char *equal = memchr(item.data, '=', item.length);
        if (!equal || equal == item.data)
            return tg__error(error, TG_E_CONFIG, "store '%s': expected name=value after '?' and '&'",
                             show_uri(text, shown, sizeof shown));
        if (uri->option_count == sizeof uri->options / sizeof *uri->options)
            return tg__error(error, TG_E_CONFIG, "store '%s': too many options",
                             show_uri(text, shown, sizeof shown));
        const tg_text name = { item.data, (size_t)(equal - item.data) };
        for (size_t i = 0; i < uri->option_count; i++)
            if (uri->options[i].name.length == name.length &&
                memcmp(uri->options[i].name.data, name.data, name.length) == 0)
                return tg__error(error, TG_E_CONFIG, "store '%s': an option is given twice",
                                 show_uri(text, shown, sizeof shown));
        uri->options[uri->option_count].name = name;
        uri->options[uri->option_count].value = (tg_text){ equal + 1, item.length - name.length - 1 };
        uri->option_count++;
        query.data += item.length + (ampersand ? 1 : 0);
        query.length -= item.length + (ampersand ? 1 : 0);
    }
    return TG_OK;
}

static const struct kind {
    const char *scheme;
    tg_status (*open)(const tg_store_uri *, const tg_store_options *, tg_store **, tg_error *);
    tg_status (*check)(const tg_store_uri *, const tg_rule *, tg_error *);
} kinds[] = {
    { "memory", tg__table_open, tg__table_check_address },         { "shared", tg__table_open, tg__table_check_address },
    { "redis", tg__redis_open, tg__redis_check_address },          { "rediss", tg__redis_open, tg__redis_check_address },
    { "redis+unix", tg__redis_open, tg__redis_check_address },     { "redis+sentinel", tg__redis_open, tg__redis_check_address },
    { "redis+cluster", tg__redis_open, tg__redis_check_address },  { "rediss+cluster", tg__redis_open, tg__redis_check_address },
    { "rediss+sentinel", tg__redis_open, tg__redis_check_address },
};

/* `tiered`: the scheme has that in front, which is then cut off. */
static tg_status
find_kind(tg_text text, tg_store_uri *uri, const struct kind **kind, bool *with_tiers, tg_error *error)
{
    static const char tiered[] = "tiered+";
    char shown[64];
    const tg_status status = parse_uri(text, uri, error);
    if (status != TG_OK)
        return status;
    tg__text_show(uri->scheme, shown, sizeof shown);
    tg_text scheme = uri->scheme;
    *with_tiers = scheme.length > sizeof tiered - 1 && memcmp(scheme.data, tiered, sizeof tiered - 1) == 0;
    if (*with_tiers)
        scheme = (tg_text){ scheme.data + sizeof tiered - 1, scheme.length - (sizeof tiered - 1) };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (tg__text_is(scheme, kinds[i].scheme) && (!*with_tiers || kinds[i].open == tg__redis_open)) {
            *kind = &kinds[i];
            return TG_OK;
        }
    if (*with_tiers)
        return tg__error(error, TG_E_CONFIG, "store '%s://': tiers stand before a Redis store: tiered+redis://", shown);
    return tg__error(error, TG_E_CONFIG,
                     "store '%s://': unknown kind; expected memory://, shared://, redis://, redis+unix://, "
                     "redis+sentinel:// or redis+cluster:// (with TLS rediss, rediss+...; for Valkey the same; tiered+ before any "
                     "of them)", shown);
}

tg_status
tg__store_check_address(tg_text uri, const tg_rule *rule, tg_error *error)
{
    tg_store_uri parsed;
    const struct kind *kind;
    bool with_tiers;
    const tg_status status = find_kind(uri, &parsed, &kind, &with_tiers, error);
    if (status != TG_OK)
        return status;
    return (with_tiers ? tg__tiered_check_address : kind->check)(&parsed, rule, error);
}

static tg_status
construct(tg_text uri, const tg_store_options *options, tg_store **store, tg_error *error)
{
    tg_store_uri parsed;
    const struct kind *kind;
    bool with_tiers;
    const tg_status status = find_kind(uri, &parsed, &kind, &with_tiers, error);
    if (status != TG_OK)
        return status;
    return with_tiers ? tg__tiered_open(&parsed, options, store, error) : kind->open(&parsed, options, store, error);
}

/* By what keys are made, as far as the opener says: what is kept in Redis is nobody's word. */
static void
keyed_by(const tg_store_options *options, uint8_t keyed[16])
{
    const tg_text pieces[] = { options->secret.length ? options->secret : tg_text_of(getenv("TIDEGATE_SECRET")),
                               { (const char *)&options->private_kinds, sizeof options->private_kinds } };
    tg__digest(pieces, 2, keyed, 16);
}

static tg_store *
find(tg_text uri, const tg_clock *clock)
{
    for (tg_store *store = registry; store; store = store->next)
        if (store->clock == clock && tg__text_is(uri, store->uri))
            return store;
    return NULL;
}

tg_status
tg_store_open(tg_text uri, const tg_store_options *given, tg_store **store, tg_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, registry_begin);
    tg_store_options options = given ? *given : (tg_store_options){ .clock = NULL };
    if (options.timeout_us == 0)
        options.timeout_us = DEFAULT_TIMEOUT_US;
    if (options.timeout_us > TIMEOUT_US_MAX)
        return tg__error(error, TG_E_ARG, "a store's timeout is at most 2 s");
    if (uri.length == 0)
        uri = tg_text_of(getenv("TIDEGATE_STORE"));
    if (uri.length == 0)
        uri = tg_text_of(DEFAULT_URI);
    if (memchr(uri.data, '\0', uri.length))
        return tg__error(error, TG_E_CONFIG, "a store's URI holds a NUL byte");
    tg_status status = tg__digest_init(error);
    if (status != TG_OK)
        return status;

    pthread_mutex_lock(&opening_lock);
    registry_hold();
    tg_store *found = find(uri, options.clock);
    if (found)
        atomic_fetch_add(&found->references, 1);
    registry_release();
    uint8_t keyed[16];
    keyed_by(&options, keyed);
    if (found && found->ops->remote && (options.secret.length || options.private_kinds) &&
        memcmp(found->keyed, keyed, sizeof keyed) != 0) {
        status = tg__error(error, TG_E_CONFIG,
                           "store %s is open in this process with another secret or other private kinds: its keys would not "
                           "be those of other machines; open it first where both are named, or set TIDEGATE_SECRET for all",
                           found->shown ? found->shown : found->uri);
        goto done;
    }
    if (found) {
        *store = found;
        found = NULL; /* the caller's now */
        goto done;
    }
    char *copy = strndup(uri.data, uri.length);
    if (!copy) {
        status = tg__error(error, TG_E_NOMEM, "store: %zu bytes", uri.length + 1);
        goto done;
    }
    tg_store *made = NULL;
    status = construct(uri, &options, &made, error);
    if (status != TG_OK) {
        free(copy);
        goto done;
    }
    made->uri = copy;
    made->private_kinds = options.private_kinds;
    memcpy(made->keyed, keyed, sizeof keyed);
    made->clock = options.clock;
    atomic_store(&made->references, 1);
    if (made->clock)
        tg_clock_retain(made->clock);
    registry_hold();
    made->next = registry;
    registry = made;
    registry_release();
    *store = made;
done:
    pthread_mutex_unlock(&opening_lock);
    tg_store_close(found);
    return status;
}

void
tg__store_retain(tg_store *store)
{
    atomic_fetch_add(&store->references, 1); /* the caller has one: it cannot go meanwhile */
}

void
tg_store_close(tg_store *store)
{
    if (!store)
        return;
    unsigned references = atomic_load(&store->references);
    while (references > 1)
        if (atomic_compare_exchange_weak(&store->references, &references, references - 1))
            return;
    registry_hold();
    const bool last = atomic_fetch_sub(&store->references, 1) == 1; /* else it has been opened again meanwhile */
    if (last)
        for (tg_store **link = &registry; *link; link = &(*link)->next)
            if (*link == store) {
                *link = store->next;
                break;
            }
    registry_release();
    if (!last)
        return;
    free(store->uri);
    tg_clock *clock = store->clock;
    store->ops->close(store);
    tg_clock_close(clock);
}

uint64_t
tg_store_now_us(tg_store *store)
{
    return store->ops->now_us(store);
}

int64_t
tg_store_utc_offset_us(tg_store *store)
{
    return store->ops->utc_offset_us(store);
}

bool
tg_store_remote(const tg_store *store)
{
    return store->ops->remote;
}

static _Thread_local void (*before_waiting)(void *context);
static _Thread_local void *before_waiting_context;

bool
tg_store_before_waiting(const tg_store *store, void (*wait)(void *context), void *context)
{
    if (!store->ops->tells_of_waiting)
        return false;
    before_waiting = wait;
    before_waiting_context = context;
    return true;
}

void
tg__store_waits(void)
{
    void (*const wait)(void *) = before_waiting;
    if (!wait)
        return;
    before_waiting = NULL;
    wait(before_waiting_context);
}

tg_status
tg_store_read_stats(tg_store *store, tg_store_stats *stats, tg_error *error)
{
    return store->ops->stats(store, stats, error);
}
