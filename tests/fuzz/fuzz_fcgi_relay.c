/* A relayed request under arbitrary bytes from both sides, split anywhere: what the application and the web server get
 * must be records, must not depend on the split, and must be bounded by what came in. The first bytes choose the splits
 * and the prefix; the rest is cut in two: the web server's stream and the application's. */
#include "../../fcgi/exchange.h"

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

typedef struct splits {
    const uint8_t *sizes; /* NULL: all at once */
    size_t count, next;
} splits;

static size_t
next_part(splits *cut, size_t left)
{
    const size_t part = cut->count ? cut->sizes[cut->next++ % cut->count] + 1u : left;
    return part < left ? part : left;
}

static bool
pass(void *context, tg_text name, tg_text *value)
{
    (void)context;
    if (name.length > 0 && name.data[0] == 'S' && value->length > 2)
        *value = (tg_text){ .data = value->data + 1, .length = value->length - 2 }; /* only ever shorter */
    return name.length == 0 || name.data[0] != 'T';
}

/* What all records of one type and request say together; FNV-1a. */
typedef struct told {
    uint64_t content[12];
    size_t bytes[12];
    size_t ends[12];
    fcgi_exchange_state state;
    fcgi_protocol_status status;
    bool answered, surplus;
} told;

/* Reads records that we wrote: they have to be whole and right. */
static void
read_records(told *all, const uint8_t *data, size_t length, unsigned id)
{
    size_t at = 0;
    while (at < length) {
        require(length - at >= FCGI_HEADER_BYTES && data[at] == 1);
        const uint8_t type = data[at + 1];
        const size_t content = (size_t)data[at + 4] << 8 | data[at + 5];
        require(type >= 1 && type <= 11);
        require(((unsigned)data[at + 2] << 8 | data[at + 3]) == id);
        require(length - at - FCGI_HEADER_BYTES >= content + data[at + 6]);
        const uint8_t *bytes = data + at + FCGI_HEADER_BYTES;
        if (content == 0)
            all->ends[type]++;
        all->bytes[type] += content;
        for (size_t i = 0; i < content; i++)
            all->content[type] = (all->content[type] ^ bytes[i]) * UINT64_C(0x100000001b3);
        at += FCGI_HEADER_BYTES + content + data[at + 6];
    }
}

static told
run(const uint8_t *front, size_t front_length, const uint8_t *back, size_t back_length, splits cut, tg_text prefix)
{
    told all;
    memset(&all, 0, sizeof all); /* padding too: transcripts are compared as bytes */
    fcgi_pool pool;
    fcgi_session session;
    fcgi_pool_init(&pool, &bounds);
    fcgi_session_init(&session, &pool);
    static fcgi_exchange exchange;
    fcgi_request *request = NULL;
    bool begun = false, fine = true;

    for (size_t at = 0; at < front_length && fine;) {
        const size_t part = next_part(&cut, front_length - at);
        uint8_t *copy = malloc(part);
        require(copy != NULL);
        memcpy(copy, front + at, part);
        for (size_t used = 0; used < part && fine;) {
            fcgi_event event;
            used += fcgi_session_feed(&session, copy + used, part - used, &event);
            if (event.kind == FCGI_EVENT_READY && !begun) {
                const fcgi_exchange_options options = {
                    .front_id = event.request->id,
                    .role = event.request->role,
                    .keep = event.request->keep,
                    .params = { .data = event.request->params, .length = event.request->params_length },
                    .pass = pass,
                    .wants_head = true,
                    .prefix = prefix,
                };
                begun = true;
                request = event.request;
                request->streams = true;
                fine = fcgi_exchange_begin(&exchange, &options);
            } else if (event.kind == FCGI_EVENT_STREAM) {
                require(event.request == request);
                require(fcgi_exchange_stream(&exchange, event.type, event.data, event.length));
            } else if (event.kind == FCGI_EVENT_ABORTED && event.request == request) {
                require(fcgi_exchange_abort(&exchange));
                fcgi_session_finish(&session, request);
                request = NULL;
            } else if (event.kind == FCGI_EVENT_READY || event.kind == FCGI_EVENT_TOO_LARGE ||
                       event.kind == FCGI_EVENT_ABORTED) {
                fcgi_session_finish(&session, event.request);
            } else if (event.kind == FCGI_EVENT_BROKEN || event.kind == FCGI_EVENT_BUSY) {
                fine = false; /* nothing more is read before a request has ended, which none does here by itself */
            }
        }
        free(copy);
        at += part;
    }
    if (begun) {
        const unsigned id = exchange.front_id;
        if (fine || exchange.out.length > 0)
            read_records(&all, exchange.out.data + exchange.out.at, fcgi_queue_bytes(&exchange.out), 1);
        all.content[0] = all.ends[FCGI_STDIN];
        uint8_t *gathered = malloc(2 * back_length + FCGI_EXCHANGE_EXTRA_BYTES + 24 * back_length + 1);
        require(gathered != NULL);
        size_t length = 0;
        for (size_t at = 0; at < back_length && exchange.state == FCGI_EXCHANGE_OPEN;) {
            const size_t part = next_part(&cut, back_length - at);
            uint8_t *copy = malloc(part), *out = malloc(part + FCGI_EXCHANGE_EXTRA_BYTES);
            require(copy && out);
            memcpy(copy, back + at, part);
            const size_t written = fcgi_exchange_reply(&exchange, copy, part, out);
            require(written <= part + FCGI_EXCHANGE_EXTRA_BYTES);
            memcpy(gathered + length, out, written);
            length += written;
            free(copy);
            free(out);
            at += part;
        }
        /* The web server's side has a table of its own behind the application's. */
        told back_side;
        memset(&back_side, 0, sizeof back_side);
        read_records(&back_side, gathered, length, id);
        require(back_side.ends[FCGI_STDOUT] <= 1 && back_side.bytes[FCGI_END_REQUEST] <= 8);
        require(back_side.bytes[FCGI_STDOUT] == 0 || back_side.bytes[FCGI_STDOUT] >= prefix.length);
        for (size_t i = 0; i < 12; i++) {
            all.content[i] ^= back_side.content[i] * 31;
            all.bytes[i] += back_side.bytes[i] * 65537;
        }
        require(exchange.seen.length <= FCGI_HEAD_BYTES_MAX);
        for (size_t i = 0; i < exchange.seen.length; i++)
            all.content[11] = (all.content[11] ^ exchange.seen.data[i]) * UINT64_C(0x100000001b3);
        all.ends[11] = exchange.head_seen;
        all.ends[1] = back_side.ends[FCGI_STDOUT];
        all.state = exchange.state;
        all.status = exchange.status;
        all.answered = exchange.answered;
        free(gathered);
        fcgi_exchange_fini(&exchange);
    }
    fcgi_session_fini(&session);
    fcgi_pool_fini(&pool);
    return all;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4)
        return 0;
    const size_t split_count = 1 + data[0] % 7, front_share = data[1];
    const tg_text prefix = { .data = "X-RateLimit-Limit: 10\r\n", .length = data[2] % 24 };
    if (size < 3 + split_count)
        return 0;
    const uint8_t *stream = data + 3 + split_count;
    const size_t length = size - 3 - split_count, front = length * front_share / 255;
    static const uint8_t single[] = { 0 };
    const told whole = run(stream, front, stream + front, length - front, (splits){ 0 }, prefix);
    const told split = run(stream, front, stream + front, length - front, (splits){ data + 3, split_count, 0 }, prefix);
    const told bytes = run(stream, front, stream + front, length - front, (splits){ single, 1, 0 }, prefix);
    require(memcmp(&whole, &split, sizeof whole) == 0);
    require(memcmp(&whole, &bytes, sizeof whole) == 0);
    return 0;
}
