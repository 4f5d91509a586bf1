/* The codec under arbitrary bytes, split anywhere: what a session says must not depend on the split, and what it
 * holds must stay within its bounds. The first bytes of the input choose the splits; the rest is the stream. */
#include "../../fcgi/codec.h"

#include <stdlib.h>
#include <string.h>

static const fcgi_bounds bounds = {
    .params_bytes_max = 3000, .requests_max = 5, .held_bytes_max = 1u << 20, .connections_max = 100
};

static void
require(bool holds)
{
    if (!holds)
        abort();
}

/* FNV-1a over everything a session says. */
typedef struct transcript {
    uint64_t hash;
    size_t events;
} transcript;

static void
tell(transcript *told, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < length; i++)
        told->hash = (told->hash ^ bytes[i]) * UINT64_C(0x100000001b3);
}

static void
tell_params(transcript *told, const fcgi_request *request)
{
    /* Cut off where too large: how much had been gathered by then may depend on the split. */
    fcgi_params params = { .data = request->params, .length = request->params_length };
    tg_text name, value;
    fcgi_params_step step;
    while ((step = fcgi_params_next(&params, &name, &value)) == FCGI_PARAMS_PAIR) {
        require((const uint8_t *)name.data >= request->params);
        require((const uint8_t *)value.data + value.length <= request->params + request->params_length);
        if (request->complete) {
            tell(told, name.data, name.length);
            tell(told, value.data, value.length);
        }
    }
    if (request->complete)
        tell(told, &step, sizeof step);
}

/* `keep`: requests are not finished at once but when the next one is ready, as a later round's answers would. */
static transcript
run(const uint8_t *data, size_t length, const uint8_t *splits, size_t split_count, bool keep)
{
    transcript told = { .hash = UINT64_C(0xcbf29ce484222325) };
    fcgi_pool pool;
    fcgi_session session;
    fcgi_pool_init(&pool, &bounds);
    fcgi_session_init(&session, &pool);
    fcgi_request *kept = NULL;
    size_t at = 0, piece = 0;
    bool broken = false;
    while (at < length && !broken) {
        size_t part = split_count ? splits[piece++ % split_count] + 1u : length - at;
        if (part > length - at)
            part = length - at;
        /* A copy of its own size: reading past the piece is seen by the sanitizer. */
        uint8_t *copy = malloc(part);
        require(copy);
        memcpy(copy, data + at, part);
        size_t used = 0;
        while (used < part) {
            fcgi_event event;
            const size_t took = fcgi_session_feed(&session, copy + used, part - used, &event);
            require(took <= part - used);
            used += took;
            require(session.request_count <= bounds.requests_max);
            require(pool.held_bytes <= bounds.held_bytes_max + sizeof(fcgi_request));
            if (event.kind == FCGI_EVENT_MORE) {
                require(used == part);
                break;
            }
            if (event.kind == FCGI_EVENT_STREAM) { /* how it is cut depends on the split; its bytes do not */
                require(event.request == kept && event.request->streams);
                require(event.length == 0 || (event.data >= copy && event.data + event.length <= copy + part));
                if (event.length == 0)
                    tell(&told, &event.type, sizeof event.type);
                tell(&told, event.data, event.length);
                continue;
            }
            told.events++;
            tell(&told, &event.kind, sizeof event.kind);
            switch (event.kind) {
            case FCGI_EVENT_MORE:
            case FCGI_EVENT_STREAM:
                break;
            case FCGI_EVENT_READY:
            case FCGI_EVENT_TOO_LARGE:
            case FCGI_EVENT_ABORTED:
                require(event.request->params_length <= bounds.params_bytes_max);
                tell(&told, &event.request->id, sizeof event.request->id);
                tell(&told, &event.request->keep, sizeof event.request->keep);
                tell_params(&told, event.request);
                if (kept && (event.request == kept || !keep || event.kind == FCGI_EVENT_READY)) {
                    if (kept != event.request)
                        fcgi_session_finish(&session, kept);
                    kept = NULL;
                }
                if (keep && event.kind == FCGI_EVENT_READY)
                    kept = event.request, kept->streams = true;
                else
                    fcgi_session_finish(&session, event.request);
                break;
            case FCGI_EVENT_BUSY:
                require(kept != NULL && kept->id == session.id && fcgi_session_is_busy(&session));
                fcgi_session_finish(&session, kept);
                kept = NULL;
                require(!fcgi_session_is_busy(&session));
                break;
            case FCGI_EVENT_REPLY:
                require(event.reply_length <= FCGI_REPLY_BYTES_MAX);
                tell(&told, event.reply, event.reply_length);
                tell(&told, &event.last, sizeof event.last);
                break;
            case FCGI_EVENT_BROKEN:
                require(event.why != NULL);
                broken = true;
                break;
            }
            if (broken)
                break;
        }
        free(copy);
        at += part;
    }
    const bool waits = fcgi_session_waits(&session);
    tell(&told, &waits, sizeof waits);
    fcgi_session_fini(&session);
    fcgi_pool_fini(&pool);
    require(pool.held_bytes == 0);
    return told;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    const bool keep = (data[0] & 1) != 0;
    const size_t split_count = (data[0] >> 1) % 8;
    if (size < 1 + split_count)
        return 0;
    const uint8_t *stream = data + 1 + split_count;
    const size_t length = size - 1 - split_count;
    static const uint8_t single[] = { 0 };
    const transcript whole = run(stream, length, NULL, 0, keep);
    const transcript split = run(stream, length, data + 1, split_count, keep);
    const transcript bytes = run(stream, length, single, 1, keep);
    require(whole.hash == split.hash && whole.events == split.events);
    require(whole.hash == bytes.hash && whole.events == bytes.events);

    uint8_t out[FCGI_WRAP_BYTES + 64];
    const size_t text = size < 64 ? size : 64;
    memcpy(out + FCGI_HEADER_BYTES, data, text);
    require(fcgi_wrap_answer(out, 7, text) <= sizeof out);
    return 0;
}
