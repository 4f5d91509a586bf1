/* One relayed request: see exchange.h. */
#include "exchange.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define BACK_ID 1u
#define RECORD_BYTES_MAX 65528u /* content of a record that we cut ourselves: eight divides it */

/* ---- queues */

bool
fcgi_queue_put(fcgi_queue *queue, const void *data, size_t length)
{
    if (queue->keeps && queue->length + length > FCGI_AGAIN_BYTES_MAX)
        queue->keeps = false;
    if (length > queue->room - queue->length && queue->at > 0 && !queue->keeps) {
        memmove(queue->data, queue->data + queue->at, queue->length - queue->at);
        queue->length -= queue->at;
        queue->at = 0;
    }
    if (length > queue->room - queue->length) {
        size_t room = queue->room ? queue->room : 2048;
        while (room - queue->length < length)
            room *= 2;
        uint8_t *grown = realloc(queue->data, room);
        if (!grown)
            return false;
        queue->data = grown;
        queue->room = room;
    }
    if (length > 0)
        memcpy(queue->data + queue->length, data, length);
    queue->length += length;
    return true;
}

void
fcgi_queue_take(fcgi_queue *queue, size_t length)
{
    assert(length <= fcgi_queue_bytes(queue));
    queue->at += length;
    if (queue->at == queue->length && !queue->keeps)
        queue->at = queue->length = 0;
}

void
fcgi_queue_fini(fcgi_queue *queue)
{
    free(queue->data);
    *queue = (fcgi_queue){ 0 };
}

/* ---- to the application */

static bool
put_record(fcgi_queue *queue, fcgi_type type, const uint8_t *data, size_t length)
{
    size_t at = 0;
    do {
        const size_t part = length - at < RECORD_BYTES_MAX ? length - at : RECORD_BYTES_MAX;
        uint8_t head[FCGI_HEADER_BYTES];
        fcgi_put_header(head, type, BACK_ID, part, 0);
        if (!fcgi_queue_put(queue, head, sizeof head) || (part > 0 && !fcgi_queue_put(queue, data + at, part)))
            return false;
        at += part;
    } while (at < length);
    return true;
}

static size_t
write_length(uint8_t *out, size_t length)
{
    if (length < 0x80) {
        out[0] = (uint8_t)length;
        return 1;
    }
    out[0] = (uint8_t)(length >> 24 | 0x80);
    out[1] = (uint8_t)(length >> 16);
    out[2] = (uint8_t)(length >> 8);
    out[3] = (uint8_t)length;
    return 4;
}

/* Writes the parameters that are passed on. A value only ever becomes shorter, so they fit where they were. */
static bool
filter_params(const fcgi_exchange_options *options, uint8_t *out, size_t *length)
{
    fcgi_params params = options->params;
    tg_text name, value;
    fcgi_params_step step;
    size_t at = 0;
    while ((step = fcgi_params_next(&params, &name, &value)) == FCGI_PARAMS_PAIR) {
        if (options->pass && !options->pass(options->context, name, &value))
            continue;
        at += write_length(out + at, name.length);
        at += write_length(out + at, value.length);
        if (name.length)
            memcpy(out + at, name.data, name.length);
        if (value.length)
            memcpy(out + at + name.length, value.data, value.length);
        at += name.length + value.length;
    }
    *length = at;
    return step == FCGI_PARAMS_END;
}

bool
fcgi_exchange_begin(fcgi_exchange *exchange, const fcgi_exchange_options *options)
{
    memset(exchange, 0, offsetof(fcgi_exchange, prefix)); /* the prefix's room is written below, as far as it is used */
    exchange->front_id = options->front_id;
    exchange->keep = options->keep;
    exchange->out.keeps = true;
    exchange->wants_head = options->wants_head;
    if (options->prefix.length > sizeof exchange->prefix)
        return false;
    if (options->prefix.length)
        memcpy(exchange->prefix, options->prefix.data, options->prefix.length);
    exchange->prefix_length = options->prefix.length;

    const uint8_t begin[8] = { 0, options->role, options->keep ? 1 : 0 };
    uint8_t *filtered = malloc(options->params.length + 1);
    size_t length = 0;
    const bool fine = filtered && filter_params(options, filtered, &length) &&
                      put_record(&exchange->out, FCGI_BEGIN_REQUEST, begin, sizeof begin) &&
                      (length == 0 || put_record(&exchange->out, FCGI_PARAMS, filtered, length)) &&
                      put_record(&exchange->out, FCGI_PARAMS, NULL, 0);
    free(filtered);
    return fine;
}

void
fcgi_exchange_fini(fcgi_exchange *exchange)
{
    fcgi_queue_fini(&exchange->out);
    fcgi_queue_fini(&exchange->seen);
}

bool
fcgi_exchange_stream(fcgi_exchange *exchange, uint8_t type, const uint8_t *data, size_t length)
{
    if (type == FCGI_STDIN) {
        if (exchange->stdin_ended)
            return true; /* what comes behind its end is nothing */
        exchange->stdin_ended = length == 0;
    }
    return put_record(&exchange->out, (fcgi_type)type, data, length);
}

bool
fcgi_exchange_abort(fcgi_exchange *exchange)
{
    return put_record(&exchange->out, FCGI_ABORT_REQUEST, NULL, 0);
}

bool
fcgi_exchange_again(fcgi_exchange *exchange)
{
    if (!exchange->out.keeps || exchange->heard)
        return false;
    exchange->out.at = 0;
    return true;
}

/* ---- from the application */

static void
break_exchange(fcgi_exchange *exchange, const char *why)
{
    exchange->state = FCGI_EXCHANGE_BROKEN;
    exchange->why = why;
}

static void
start_record(fcgi_exchange *exchange)
{
    const uint8_t *head = exchange->head;
    if (head[0] != 1) {
        break_exchange(exchange, "not FastCGI version 1");
        return;
    }
    const unsigned id = (unsigned)head[2] << 8 | head[3];
    exchange->type = head[1];
    exchange->content_left = (uint16_t)((unsigned)head[4] << 8 | head[5]);
    exchange->padding_left = head[6];
    exchange->ours = id == BACK_ID;
    exchange->end_length = 0;
    if (id != BACK_ID && id != 0) {
        break_exchange(exchange, "an answer to a request that was not asked");
        return;
    }
    if (exchange->ours && exchange->type == FCGI_END_REQUEST && exchange->content_left < sizeof exchange->end)
        break_exchange(exchange, "END_REQUEST is too short");
}

/* The fields end with an empty line; lines end with CR LF or, from simple programs, with LF. Out of memory: they count
 * as seen, as far as they are. */
static void
gather_head(fcgi_exchange *exchange, const uint8_t *data, size_t length)
{
    fcgi_queue *seen = &exchange->seen;
    size_t at = seen->length;
    const size_t room = FCGI_HEAD_BYTES_MAX - seen->length;
    if (!fcgi_queue_put(seen, data, length < room ? length : room)) {
        exchange->head_seen = true;
        return;
    }
    for (; at < seen->length; at++) {
        if (seen->data[at] != '\n')
            continue;
        const size_t before = at >= 1 && seen->data[at - 1] == '\r' ? at - 1 : at;
        if (before == 0 || seen->data[before - 1] == '\n') {
            seen->length = at + 1; /* what is behind is body */
            exchange->head_seen = true;
            return;
        }
    }
    exchange->head_seen = seen->length == FCGI_HEAD_BYTES_MAX;
}

static size_t
pass_content(fcgi_exchange *exchange, const uint8_t *data, size_t length, uint8_t *out)
{
    size_t at = 0;
    if (exchange->type == FCGI_STDOUT && !exchange->answered) {
        exchange->answered = true;
        if (exchange->prefix_length > 0) {
            fcgi_put_header(out, FCGI_STDOUT, exchange->front_id, exchange->prefix_length, 0);
            memcpy(out + FCGI_HEADER_BYTES, exchange->prefix, exchange->prefix_length);
            at = FCGI_HEADER_BYTES + exchange->prefix_length;
        }
    }
    if (exchange->type == FCGI_STDOUT && exchange->wants_head && !exchange->head_seen)
        gather_head(exchange, data, length);
    fcgi_put_header(out + at, (fcgi_type)exchange->type, exchange->front_id, length, 0);
    at += FCGI_HEADER_BYTES;
    memcpy(out + at, data, length);
    return at + length;
}

static size_t
end_exchange(fcgi_exchange *exchange, uint8_t *out)
{
    exchange->state = FCGI_EXCHANGE_ENDED;
    exchange->status = (fcgi_protocol_status)exchange->end[4];
    if (exchange->status != FCGI_REQUEST_COMPLETE && !exchange->answered)
        return 0;
    fcgi_put_header(out, FCGI_STDOUT, exchange->front_id, 0, 0);
    fcgi_put_header(out + FCGI_HEADER_BYTES, FCGI_END_REQUEST, exchange->front_id, 8, 0);
    memcpy(out + 2 * FCGI_HEADER_BYTES, exchange->end, 8);
    return 2 * FCGI_HEADER_BYTES + 8;
}

static size_t
take_content(fcgi_exchange *exchange, const uint8_t *data, size_t length, uint8_t *out)
{
    size_t written = 0;
    if (exchange->ours && (exchange->type == FCGI_STDOUT || exchange->type == FCGI_STDERR))
        written = pass_content(exchange, data, length, out);
    if (exchange->ours && exchange->type == FCGI_END_REQUEST) {
        for (size_t i = 0; i < length && exchange->end_length < sizeof exchange->end; i++)
            exchange->end[exchange->end_length++] = data[i];
        if (exchange->end_length == sizeof exchange->end)
            written = end_exchange(exchange, out);
    }
    exchange->content_left = (uint16_t)(exchange->content_left - length);
    return written;
}

size_t
fcgi_exchange_reply(fcgi_exchange *exchange, const uint8_t *data, size_t length, uint8_t *out)
{
    size_t at = 0, written = 0;
    if (length > 0 && !exchange->heard) {
        exchange->heard = true;
        exchange->out.keeps = false;
    }
    while (at < length && exchange->state != FCGI_EXCHANGE_BROKEN) {
        const size_t left = length - at;
        if (exchange->content_left > 0) {
            const size_t part = left < exchange->content_left ? left : exchange->content_left;
            if (exchange->state == FCGI_EXCHANGE_OPEN)
                written += take_content(exchange, data + at, part, out + written);
            else
                exchange->content_left = (uint16_t)(exchange->content_left - part);
            at += part;
        } else if (exchange->padding_left > 0) {
            const size_t part = left < exchange->padding_left ? left : exchange->padding_left;
            exchange->padding_left = (uint8_t)(exchange->padding_left - part);
            at += part;
        } else if (exchange->state == FCGI_EXCHANGE_ENDED) {
            exchange->surplus = true;
            break;
        } else {
            exchange->head[exchange->head_length++] = data[at++];
            if (exchange->head_length == FCGI_HEADER_BYTES) {
                exchange->head_length = 0;
                start_record(exchange);
            }
        }
    }
    assert(written <= length + FCGI_EXCHANGE_EXTRA_BYTES);
    return written;
}
