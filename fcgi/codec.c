/* FastCGI 1.0 records: see codec.h. Everything here is arithmetic on bytes that somebody else chose. */
#include "codec.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEEP_CONN 1u
#define BEGIN_BYTES 8u
#define PARAMS_ROOM_MIN 1024u

/* ---- parameters */

static bool
read_length(const uint8_t *data, size_t length, size_t *offset, size_t *value)
{
    if (*offset >= length)
        return false;
    const uint8_t first = data[*offset];
    if (first < 0x80) {
        *value = first;
        *offset += 1;
        return true;
    }
    if (length - *offset < 4)
        return false;
    *value = (size_t)(first & 0x7f) << 24 | (size_t)data[*offset + 1] << 16 | (size_t)data[*offset + 2] << 8 |
             (size_t)data[*offset + 3];
    *offset += 4;
    return true;
}

fcgi_params_step
fcgi_params_next(fcgi_params *params, tg_text *name, tg_text *value)
{
    size_t at = params->offset;
    if (at == params->length)
        return FCGI_PARAMS_END;
    size_t name_length, value_length;
    if (!read_length(params->data, params->length, &at, &name_length) ||
        !read_length(params->data, params->length, &at, &value_length))
        return FCGI_PARAMS_BAD;
    const size_t left = params->length - at;
    /* Two subtractions instead of one sum: lengths of 2^31 - 1 each wrapped a 32-bit sum in libfcgi
     * (CVE-2025-23016). */
    if (name_length > left || value_length > left - name_length)
        return FCGI_PARAMS_BAD;
    const char *text = (const char *)params->data + at;
    *name = (tg_text){ .data = text, .length = name_length };
    *value = (tg_text){ .data = text + name_length, .length = value_length };
    params->offset = at + name_length + value_length;
    return FCGI_PARAMS_PAIR;
}

/* ---- the pool */

void
fcgi_pool_init(fcgi_pool *pool, const fcgi_bounds *bounds)
{
    *pool = (fcgi_pool){ .bounds = *bounds };
}

void
fcgi_pool_fini(fcgi_pool *pool)
{
    assert(pool->held_bytes == 0);
    while (pool->idle) {
        fcgi_request *request = pool->idle;
        pool->idle = request->next;
        free(request->params);
        free(request);
    }
    pool->idle_count = 0;
}

static fcgi_request *
take_request(fcgi_pool *pool)
{
    if (pool->held_bytes >= pool->bounds.held_bytes_max)
        return NULL;
    fcgi_request *request = pool->idle;
    if (request) {
        pool->idle = request->next;
        pool->idle_count--;
    } else {
        request = calloc(1, sizeof *request);
        if (!request)
            return NULL;
    }
    /* The struct counts too, or requests without parameters would be free of charge. */
    pool->held_bytes += request->params_room + sizeof *request;
    request->complete = false;
    request->streams = false;
    request->owner = NULL;
    request->params_length = 0;
    request->begun_us = 0;
    request->next = NULL;
    return request;
}

static void
give_request(fcgi_pool *pool, fcgi_request *request)
{
    pool->held_bytes -= request->params_room + sizeof *request;
    if (pool->idle_count >= FCGI_POOL_KEPT || request->params_room > FCGI_PARAMS_KEPT_BYTES) {
        free(request->params);
        free(request);
        return;
    }
    request->next = pool->idle;
    pool->idle = request;
    pool->idle_count++;
}

typedef enum append_result { APPENDED, APPEND_TOO_LARGE, APPEND_NO_ROOM } append_result;

static append_result
append_params(fcgi_pool *pool, fcgi_request *request, const uint8_t *data, size_t length)
{
    if (length > pool->bounds.params_bytes_max - request->params_length)
        return APPEND_TOO_LARGE;
    const size_t wanted = request->params_length + length;
    if (wanted > request->params_room) {
        size_t room = request->params_room ? request->params_room : PARAMS_ROOM_MIN;
        while (room < wanted)
            room *= 2;
        const size_t more = room - request->params_room;
        if (pool->held_bytes + more > pool->bounds.held_bytes_max)
            return APPEND_NO_ROOM;
        uint8_t *grown = realloc(request->params, room);
        if (!grown)
            return APPEND_NO_ROOM;
        pool->held_bytes += more;
        request->params = grown;
        request->params_room = room;
    }
    memcpy(request->params + request->params_length, data, length);
    request->params_length = wanted;
    return APPENDED;
}

/* ---- writing */

void
fcgi_put_header(uint8_t *out, fcgi_type type, uint16_t id, size_t content, size_t padding)
{
    out[0] = 1;
    out[1] = (uint8_t)type;
    out[2] = (uint8_t)(id >> 8);
    out[3] = (uint8_t)id;
    out[4] = (uint8_t)(content >> 8);
    out[5] = (uint8_t)content;
    out[6] = (uint8_t)padding;
    out[7] = 0;
}

size_t
fcgi_write_end(uint8_t *out, uint16_t id, fcgi_protocol_status status)
{
    fcgi_put_header(out, FCGI_END_REQUEST, id, 8, 0);
    memset(out + FCGI_HEADER_BYTES, 0, 8);
    out[FCGI_HEADER_BYTES + 4] = (uint8_t)status;
    return FCGI_HEADER_BYTES + 8;
}

size_t
fcgi_wrap_answer(uint8_t *out, uint16_t id, size_t text_length)
{
    assert(text_length <= FCGI_CONTENT_BYTES_MAX);
    size_t at = 0;
    if (text_length > 0) {
        const size_t padding = (0u - text_length) & 7u;
        fcgi_put_header(out, FCGI_STDOUT, id, text_length, padding);
        at = FCGI_HEADER_BYTES + text_length;
        memset(out + at, 0, padding); /* or earlier answers' bytes would leak to the peer */
        at += padding;
    }
    fcgi_put_header(out + at, FCGI_STDOUT, id, 0, 0);
    at += FCGI_HEADER_BYTES;
    return at + fcgi_write_end(out + at, id, FCGI_REQUEST_COMPLETE);
}

/* ---- sessions */

void
fcgi_session_init(fcgi_session *session, fcgi_pool *pool)
{
    *session = (fcgi_session){ .pool = pool };
}

void
fcgi_session_fini(fcgi_session *session)
{
    while (session->requests)
        fcgi_session_finish(session, session->requests);
    if (session->small != session->begin)
        free(session->small);
    session->small = NULL;
}

void
fcgi_session_finish(fcgi_session *session, fcgi_request *request)
{
    fcgi_request **link = &session->requests;
    while (*link != request) {
        assert(*link);
        link = &(*link)->next;
    }
    *link = request->next;
    session->request_count--;
    if (session->filling == request)
        session->filling = NULL; /* what is left of the record is skipped */
    if (session->streaming == request)
        session->streaming = NULL;
    give_request(session->pool, request);
}

bool
fcgi_session_waits(const fcgi_session *session)
{
    if (session->head_length > 0 || session->small)
        return true;
    for (const fcgi_request *request = session->requests; request; request = request->next)
        if (!request->complete)
            return true;
    return false;
}

static fcgi_request *
find_request(const fcgi_session *session, uint16_t id)
{
    fcgi_request *request = session->requests;
    while (request && request->id != id)
        request = request->next;
    return request;
}

static void
break_session(fcgi_session *session, const char *why, fcgi_event *event)
{
    session->broken = true;
    event->kind = FCGI_EVENT_BROKEN;
    event->why = why;
}

static void
refuse_request(uint16_t id, fcgi_protocol_status status, bool keep, fcgi_event *event)
{
    event->kind = FCGI_EVENT_REPLY;
    event->last = !keep;
    event->reply_length = fcgi_write_end(event->reply, id, status);
}

static void
begin_request(fcgi_session *session, fcgi_event *event)
{
    const uint8_t *body = session->begin;
    const unsigned role = (unsigned)body[0] << 8 | body[1];
    const bool keep = (body[2] & KEEP_CONN) != 0;
    const fcgi_request *former = find_request(session, session->id);
    session->busy = former && former->complete;
    if (session->busy) { /* pipelined, and its answer comes in a later round */
        event->kind = FCGI_EVENT_BUSY;
        return;
    }
    if (former) {
        break_session(session, "BEGIN_REQUEST for a request that is already running", event);
        return;
    }
    if (role != FCGI_RESPONDER && role != FCGI_AUTHORIZER) {
        refuse_request(session->id, FCGI_UNKNOWN_ROLE, keep, event);
        return;
    }
    fcgi_request *request =
        session->request_count < session->pool->bounds.requests_max ? take_request(session->pool) : NULL;
    if (!request) {
        refuse_request(session->id, FCGI_OVERLOADED, keep, event);
        return;
    }
    request->id = session->id;
    request->role = (uint8_t)role;
    request->keep = keep;
    request->next = session->requests;
    session->requests = request;
    session->request_count++;
}

static size_t
put_value(uint8_t *out, const char *name, size_t value)
{
    char digits[24];
    const int length = snprintf(digits, sizeof digits, "%zu", value);
    const size_t name_length = strlen(name);
    out[0] = (uint8_t)name_length;
    out[1] = (uint8_t)length;
    memcpy(out + 2, name, name_length);
    memcpy(out + 2 + name_length, digits, (size_t)length);
    return 2 + name_length + (size_t)length;
}

static void
reply_values(const fcgi_session *session, fcgi_event *event)
{
    static const char *const names[] = { "FCGI_MAX_CONNS", "FCGI_MAX_REQS", "FCGI_MPXS_CONNS" };
    const fcgi_bounds *bounds = &session->pool->bounds;
    const size_t requests_max = bounds->connections_max > 65535 / bounds->requests_max
                                    ? 65535
                                    : bounds->connections_max * bounds->requests_max;
    const size_t values[] = { bounds->connections_max, requests_max, bounds->requests_max > 1 };
    bool asked[3] = { false, false, false };
    fcgi_params params = { .data = session->small, .length = session->small_length };
    tg_text name, value;
    while (session->content_left == 0 && /* more than fits is no question: the result names nothing */
           fcgi_params_next(&params, &name, &value) == FCGI_PARAMS_PAIR)
        for (size_t i = 0; i < 3; i++)
            if (name.length == strlen(names[i]) && memcmp(name.data, names[i], name.length) == 0)
                asked[i] = true; /* each at most once in the reply, however often it was asked */
    uint8_t *out = event->reply;
    size_t length = FCGI_HEADER_BYTES;
    for (size_t i = 0; i < 3; i++)
        if (asked[i])
            length += put_value(out + length, names[i], values[i]);
    fcgi_put_header(out, FCGI_GET_VALUES_RESULT, 0, length - FCGI_HEADER_BYTES, 0);
    event->kind = FCGI_EVENT_REPLY;
    event->reply_length = length;
}

static void
reply_unknown_type(const fcgi_session *session, fcgi_event *event)
{
    fcgi_put_header(event->reply, FCGI_UNKNOWN_TYPE, 0, 8, 0);
    memset(event->reply + FCGI_HEADER_BYTES, 0, 8);
    event->reply[FCGI_HEADER_BYTES] = session->type;
    event->kind = FCGI_EVENT_REPLY;
    event->reply_length = FCGI_HEADER_BYTES + 8;
}

/* A record's header is complete: decides what its content is for. May already be an event. */
static void
start_record(fcgi_session *session, const uint8_t *head, fcgi_event *event)
{
    if (head[0] != 1) {
        break_session(session, "not FastCGI version 1", event);
        return;
    }
    session->record_count++;
    session->type = head[1];
    session->id = (uint16_t)((unsigned)head[2] << 8 | head[3]);
    session->content_left = (uint16_t)((unsigned)head[4] << 8 | head[5]);
    session->padding_left = head[6];
    session->filling = session->streaming = NULL;

    if (session->id == 0 || session->type > FCGI_UNKNOWN_TYPE || session->type == 0) {
        if (session->id != 0 || session->type != FCGI_GET_VALUES) {
            reply_unknown_type(session, event);
            return;
        }
        session->small_length = 0;
        session->small = malloc(FCGI_VALUES_BYTES_MAX);
        if (!session->small)
            break_session(session, "out of memory", event);
        return;
    }
    switch (session->type) {
    case FCGI_BEGIN_REQUEST:
        if (session->content_left < BEGIN_BYTES) {
            break_session(session, "BEGIN_REQUEST is too short", event);
            return;
        }
        session->small_length = 0;
        session->small = session->begin;
        return;
    case FCGI_ABORT_REQUEST:
        event->request = find_request(session, session->id);
        if (event->request)
            event->kind = FCGI_EVENT_ABORTED;
        return;
    case FCGI_PARAMS: {
        fcgi_request *request = find_request(session, session->id);
        if (!request || request->complete)
            return;
        if (session->content_left > 0) {
            session->filling = request;
            return;
        }
        request->complete = true;
        session->stdin_ended = false;
        event->kind = FCGI_EVENT_READY;
        event->request = request;
        return;
    }
    case FCGI_STDIN:
    case FCGI_DATA: {
        if (session->type == FCGI_STDIN)
            session->stdin_ended = session->stdin_ended || session->content_left == 0;
        fcgi_request *request = find_request(session, session->id);
        if (!request || !request->streams)
            return;
        if (session->content_left > 0) {
            session->streaming = request;
            return;
        }
        event->kind = FCGI_EVENT_STREAM;
        event->request = request;
        event->type = session->type;
        return;
    }
    default: /* what only an application sends is skipped */
        return;
    }
}

/* The gathered content of a small record is complete, or its record is. */
static void
end_small(fcgi_session *session, fcgi_event *event)
{
    if (session->small == session->begin) {
        session->small = NULL;
        begin_request(session, event);
        return;
    }
    reply_values(session, event);
    free(session->small);
    session->small = NULL;
}

static size_t
take_content(fcgi_session *session, const uint8_t *data, size_t length, fcgi_event *event)
{
    size_t used = length < session->content_left ? length : session->content_left;
    if (session->filling) {
        session->content_left = (uint16_t)(session->content_left - used);
        fcgi_request *request = session->filling;
        switch (append_params(session->pool, request, data, used)) {
        case APPENDED:
            break;
        case APPEND_TOO_LARGE:
            event->kind = FCGI_EVENT_TOO_LARGE;
            event->request = request;
            break;
        case APPEND_NO_ROOM: /* not this request's fault: the pool's bytes are held by others */
            refuse_request(request->id, FCGI_OVERLOADED, request->keep, event);
            fcgi_session_finish(session, request);
            break;
        }
        return used;
    }
    if (session->small) {
        const size_t small_max = session->small == session->begin ? BEGIN_BYTES : FCGI_VALUES_BYTES_MAX;
        if (used > small_max - session->small_length)
            used = small_max - session->small_length;
        memcpy(session->small + session->small_length, data, used);
        session->small_length = (uint16_t)(session->small_length + used);
        session->content_left = (uint16_t)(session->content_left - used);
        if (session->content_left == 0 || session->small_length == small_max)
            end_small(session, event); /* content past small_max is skipped */
        return used;
    }
    session->content_left = (uint16_t)(session->content_left - used);
    if (session->streaming && used > 0) {
        event->kind = FCGI_EVENT_STREAM;
        event->request = session->streaming;
        event->type = session->type;
        event->data = data;
        event->length = used;
    }
    return used;
}

bool
fcgi_session_is_busy(const fcgi_session *session)
{
    return session->busy && find_request(session, session->id);
}

size_t
fcgi_session_feed(fcgi_session *session, const uint8_t *data, size_t length, fcgi_event *event)
{
    event->kind = FCGI_EVENT_MORE;
    event->request = NULL;
    event->why = NULL;
    event->data = NULL;
    event->length = 0;
    event->last = false;
    event->reply_length = 0;
    if (session->broken) {
        break_session(session, "broken before", event);
        return length;
    }
    size_t at = 0;
    if (session->busy)
        begin_request(session, event);
    while (event->kind == FCGI_EVENT_MORE) {
        if (session->content_left > 0) {
            if (at == length)
                break;
            at += take_content(session, data + at, length - at, event);
            continue;
        }
        if (session->small) { /* an empty GET_VALUES: nothing to gather */
            end_small(session, event);
            continue;
        }
        if (session->padding_left > 0) {
            if (at == length)
                break;
            const size_t skip = length - at < session->padding_left ? length - at : session->padding_left;
            session->padding_left = (uint8_t)(session->padding_left - skip);
            at += skip;
            continue;
        }
        if (at == length)
            break;
        if (session->head_length == 0 && length - at >= FCGI_HEADER_BYTES) {
            start_record(session, data + at, event);
            at += FCGI_HEADER_BYTES;
            continue;
        }
        session->head[session->head_length++] = data[at++];
        if (session->head_length == FCGI_HEADER_BYTES) {
            session->head_length = 0;
            start_record(session, session->head, event);
        }
    }
    return at;
}
