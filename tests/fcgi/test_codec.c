/* The record codec by itself: parameters, records, sessions, what is written. */
#include "fcgi/codec.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const fcgi_bounds small_bounds = {
    .params_bytes_max = 4096, .requests_max = 3, .held_bytes_max = 1u << 20, .connections_max = 7
};

/* ---- a stream being put together */

typedef struct stream {
    uint8_t bytes[16384];
    size_t length;
} stream;

static void
add_record(stream *to, uint8_t type, uint16_t id, const void *content, size_t length, uint8_t padding)
{
    const uint8_t head[] = { 1, type, (uint8_t)(id >> 8), (uint8_t)id, (uint8_t)(length >> 8), (uint8_t)length, padding,
                             0 };
    assert_true(to->length + sizeof head + length + padding <= sizeof to->bytes);
    memcpy(to->bytes + to->length, head, sizeof head);
    if (length)
        memcpy(to->bytes + to->length + sizeof head, content, length);
    memset(to->bytes + to->length + sizeof head + length, 0xa5, padding);
    to->length += sizeof head + length + padding;
}

static void
add_begin(stream *to, uint16_t id, uint8_t role, bool keep)
{
    const uint8_t content[8] = { 0, role, keep };
    add_record(to, FCGI_BEGIN_REQUEST, id, content, sizeof content, 0);
}

static fcgi_pool pool;
static fcgi_session session;

static int
set_up(void **unused)
{
    (void)unused;
    fcgi_pool_init(&pool, &small_bounds);
    fcgi_session_init(&session, &pool);
    return 0;
}

static int
tear_down(void **unused)
{
    (void)unused;
    fcgi_session_fini(&session);
    fcgi_pool_fini(&pool);
    return 0;
}

/* The next event of `from`, taken from its front. */
static fcgi_event
next_event(stream *from)
{
    fcgi_event event;
    const size_t used = fcgi_session_feed(&session, from->bytes, from->length, &event);
    memmove(from->bytes, from->bytes + used, from->length - used);
    from->length -= used;
    return event;
}

/* ---- parameters */

typedef struct params_case {
    const char *bytes;
    size_t length;
    size_t pairs;
    fcgi_params_step end;
} params_case;

static void
parameters_are_walked_to_their_end_or_to_the_first_damage(void **unused)
{
    (void)unused;
#define CASE(bytes, pairs, end) { bytes, sizeof(bytes) - 1, pairs, end }
    static const params_case cases[] = {
        CASE("", 0, FCGI_PARAMS_END),
        CASE("\x01\x02" "abc", 1, FCGI_PARAMS_END),
        CASE("\x00\x00", 1, FCGI_PARAMS_END),
        CASE("\x01\x00" "a" "\x01\x01" "bc", 2, FCGI_PARAMS_END),
        CASE("\x80\x00\x00\x01\x80\x00\x00\x02" "abc", 1, FCGI_PARAMS_END),
        CASE("\x01", 0, FCGI_PARAMS_BAD),
        CASE("\x01\x02" "ab", 0, FCGI_PARAMS_BAD),
        CASE("\x01\x00" "a" "\x01", 1, FCGI_PARAMS_BAD),
        CASE("\x80\x00\x00", 0, FCGI_PARAMS_BAD),
        CASE("\x01\x80\x00\x00", 0, FCGI_PARAMS_BAD),
        CASE("\xff\xff\xff\xff\xff\xff\xff\xff" "abcdefgh", 0, FCGI_PARAMS_BAD),
        CASE("\x02\xff\xff\xff\xff" "abcdefgh", 0, FCGI_PARAMS_BAD),
    };
#undef CASE
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fcgi_params params = { .data = (const uint8_t *)cases[i].bytes, .length = cases[i].length };
        tg_text name, value;
        size_t pairs = 0;
        fcgi_params_step step;
        while ((step = fcgi_params_next(&params, &name, &value)) == FCGI_PARAMS_PAIR)
            pairs++;
        if (pairs != cases[i].pairs || step != cases[i].end)
            fail_msg("case %zu: %zu pairs, end %d", i, pairs, (int)step);
        assert_int_equal(fcgi_params_next(&params, &name, &value), cases[i].end); /* it stays so */
    }
}

/* ---- sessions */

static void
a_request_is_ready_with_its_empty_params_and_not_before(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    add_begin(&in, 258, FCGI_RESPONDER, true);
    add_record(&in, FCGI_PARAMS, 258, "\x01\x01" "ab", 4, 3);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE);
    assert_true(fcgi_session_waits(&session));
    add_record(&in, FCGI_PARAMS, 258, NULL, 0, 5);
    const fcgi_event event = next_event(&in);
    assert_int_equal(event.kind, FCGI_EVENT_READY);
    assert_int_equal(event.request->id, 258);
    assert_int_equal(event.request->params_length, 4);
    assert_true(event.request->keep);
    assert_false(fcgi_session_waits(&session));
    fcgi_session_finish(&session, event.request);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE);
    assert_int_equal(pool.held_bytes, 0);
}

static void
a_request_not_finished_yet_keeps_its_id_and_others_overtake_it(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    add_begin(&in, 1, FCGI_RESPONDER, true);
    add_record(&in, FCGI_PARAMS, 1, NULL, 0, 0);
    add_begin(&in, 2, FCGI_AUTHORIZER, false);
    add_record(&in, FCGI_PARAMS, 2, NULL, 0, 0);
    const fcgi_event first = next_event(&in);
    const fcgi_event second = next_event(&in);
    assert_int_equal(second.kind, FCGI_EVENT_READY);
    assert_int_equal(second.request->role, FCGI_AUTHORIZER);
    assert_false(second.request->keep);
    fcgi_session_finish(&session, second.request);
    add_record(&in, FCGI_ABORT_REQUEST, 1, NULL, 0, 0);
    const fcgi_event aborted = next_event(&in);
    assert_int_equal(aborted.kind, FCGI_EVENT_ABORTED);
    assert_ptr_equal(aborted.request, first.request);
    fcgi_session_finish(&session, aborted.request);
}

static void
a_request_of_a_number_that_is_not_finished_waits_for_it(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    for (int i = 0; i < 2; i++) {
        add_begin(&in, 1, FCGI_RESPONDER, true);
        add_record(&in, FCGI_PARAMS, 1, NULL, 0, 0);
    }
    const fcgi_event first = next_event(&in);
    assert_int_equal(first.kind, FCGI_EVENT_READY);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_BUSY);
    assert_true(fcgi_session_is_busy(&session));
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_BUSY); /* asked again too early */
    fcgi_session_finish(&session, first.request);
    assert_false(fcgi_session_is_busy(&session));
    const fcgi_event second = next_event(&in);
    assert_int_equal(second.kind, FCGI_EVENT_READY);
    fcgi_session_finish(&session, second.request);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE);
}

static void
a_number_begun_twice_before_its_parameters_are_in_is_no_stream(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    add_begin(&in, 1, FCGI_RESPONDER, true);
    add_begin(&in, 1, FCGI_RESPONDER, true);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_BROKEN);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_BROKEN); /* it stays so */
}

static void
parameters_of_exactly_the_bound_are_taken_and_one_byte_more_is_not(void **unused)
{
    (void)unused;
    static uint8_t content[4097];
    for (size_t length = 4096; length <= 4097; length++) {
        stream in = { .length = 0 };
        add_begin(&in, 1, FCGI_RESPONDER, true);
        add_record(&in, FCGI_PARAMS, 1, content, 1000, 0);
        add_record(&in, FCGI_PARAMS, 1, content, length - 1000, 0);
        add_record(&in, FCGI_PARAMS, 1, NULL, 0, 0);
        const fcgi_event event = next_event(&in);
        assert_int_equal(event.kind, length == 4096 ? FCGI_EVENT_READY : FCGI_EVENT_TOO_LARGE);
        assert_true(event.request->params_length <= 4096);
        fcgi_session_finish(&session, event.request);
        assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE); /* the rest of it is skipped */
        assert_int_equal(in.length, 0);
    }
}

static void
the_bytes_of_all_sessions_together_are_bounded(void **unused)
{
    (void)unused;
    static uint8_t content[4000];
    enum { SESSIONS = 40 };
    fcgi_pool tight;
    fcgi_session many[SESSIONS];
    fcgi_pool_init(&tight, &(fcgi_bounds){ .params_bytes_max = 4096, .requests_max = 3, .held_bytes_max = 40000,
                                           .connections_max = 7 });
    size_t overloaded = 0, taken = 0;
    for (size_t i = 0; i < SESSIONS; i++) {
        stream in = { .length = 0 };
        add_begin(&in, 1, FCGI_RESPONDER, true);
        add_record(&in, FCGI_PARAMS, 1, content, sizeof content, 0);
        fcgi_session_init(&many[i], &tight);
        fcgi_event event;
        fcgi_session_feed(&many[i], in.bytes, in.length, &event);
        if (event.kind == FCGI_EVENT_REPLY) {
            assert_int_equal(event.reply[FCGI_HEADER_BYTES + 4], FCGI_OVERLOADED);
            overloaded++;
        } else {
            assert_int_equal(event.kind, FCGI_EVENT_MORE);
            taken++;
        }
        assert_true(tight.held_bytes <= 40000 + sizeof(fcgi_request));
    }
    assert_true(taken >= 9);
    assert_int_equal(taken + overloaded, SESSIONS);
    for (size_t i = 0; i < SESSIONS; i++)
        fcgi_session_fini(&many[i]);
    assert_int_equal(tight.held_bytes, 0);
    fcgi_pool_fini(&tight);
}

static void
requests_over_the_cap_are_told_overloaded_and_unknown_roles_so(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    for (uint16_t id = 1; id <= 3; id++)
        add_begin(&in, id, FCGI_RESPONDER, true);
    add_begin(&in, 4, FCGI_RESPONDER, true);
    fcgi_event event = next_event(&in);
    assert_int_equal(event.kind, FCGI_EVENT_REPLY);
    assert_int_equal(event.reply[3], 4);
    assert_int_equal(event.reply[FCGI_HEADER_BYTES + 4], FCGI_OVERLOADED);
    assert_false(event.last);
    add_begin(&in, 5, FCGI_FILTER, false);
    event = next_event(&in);
    assert_int_equal(event.reply[FCGI_HEADER_BYTES + 4], FCGI_UNKNOWN_ROLE);
    assert_true(event.last);
}

static void
questions_for_values_are_answered_once_each_and_only_those_known(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    static const char asked[] = "\x0f\x00" "FCGI_MPXS_CONNS" "\x03\x01" "ABCx" "\x0f\x00" "FCGI_MPXS_CONNS" "\x0d\x00"
                                "FCGI_MAX_REQS";
    static const char told[] = "\x0d\x02" "FCGI_MAX_REQS21" "\x0f\x01" "FCGI_MPXS_CONNS1";
    add_record(&in, FCGI_GET_VALUES, 0, asked, sizeof asked - 1, 2);
    const fcgi_event event = next_event(&in);
    assert_int_equal(event.kind, FCGI_EVENT_REPLY);
    assert_int_equal(event.reply[1], FCGI_GET_VALUES_RESULT);
    assert_int_equal(event.reply_length, FCGI_HEADER_BYTES + sizeof told - 1);
    assert_memory_equal(event.reply + FCGI_HEADER_BYTES, told, sizeof told - 1);
}

static void
the_end_of_stdin_is_seen_whatever_was_asked_before(void **unused)
{
    (void)unused;
    stream in = { .length = 0 };
    add_begin(&in, 1, FCGI_RESPONDER, false);
    add_record(&in, FCGI_PARAMS, 1, NULL, 0, 0);
    fcgi_session_finish(&session, next_event(&in).request);
    assert_false(session.stdin_ended);
    add_record(&in, FCGI_STDIN, 1, "body", 4, 4);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE);
    assert_false(session.stdin_ended);
    add_record(&in, FCGI_STDIN, 1, NULL, 0, 0);
    assert_int_equal(next_event(&in).kind, FCGI_EVENT_MORE);
    assert_true(session.stdin_ended);
}

/* ---- writing */

static void
an_answer_of_any_length_is_whole_padded_to_8_and_leaks_nothing(void **unused)
{
    (void)unused;
    for (size_t length = 0; length < 70; length++) {
        uint8_t out[70 + FCGI_WRAP_BYTES];
        memset(out, 0xee, sizeof out);
        memset(out + FCGI_HEADER_BYTES, 't', length);
        const size_t total = fcgi_wrap_answer(out, 0x1234, length);
        assert_true(total <= sizeof out);
        assert_int_equal(total % 8, 0);
        size_t at = 0;
        if (length > 0) {
            assert_int_equal(out[1], FCGI_STDOUT);
            assert_int_equal(out[4] << 8 | out[5], length);
            at = FCGI_HEADER_BYTES + length + out[6];
            for (size_t i = FCGI_HEADER_BYTES + length; i < at; i++)
                assert_int_equal(out[i], 0);
        }
        assert_int_equal(out[at + 1], FCGI_STDOUT);
        assert_int_equal(out[at + 4] << 8 | out[at + 5], 0);
        at += FCGI_HEADER_BYTES;
        assert_int_equal(out[at + 1], FCGI_END_REQUEST);
        assert_int_equal(out[at + 2] << 8 | out[at + 3], 0x1234);
        assert_int_equal(at + 16, total);
    }
}

int
main(void)
{
#define IN_SESSION(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_walked_to_their_end_or_to_the_first_damage),
        IN_SESSION(a_request_is_ready_with_its_empty_params_and_not_before),
        IN_SESSION(a_request_not_finished_yet_keeps_its_id_and_others_overtake_it),
        IN_SESSION(a_request_of_a_number_that_is_not_finished_waits_for_it),
        IN_SESSION(a_number_begun_twice_before_its_parameters_are_in_is_no_stream),
        IN_SESSION(parameters_of_exactly_the_bound_are_taken_and_one_byte_more_is_not),
        cmocka_unit_test(the_bytes_of_all_sessions_together_are_bounded),
        IN_SESSION(requests_over_the_cap_are_told_overloaded_and_unknown_roles_so),
        IN_SESSION(questions_for_values_are_answered_once_each_and_only_those_known),
        IN_SESSION(the_end_of_stdin_is_seen_whatever_was_asked_before),
        cmocka_unit_test(an_answer_of_any_length_is_whole_padded_to_8_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
