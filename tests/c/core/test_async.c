/* Questions that do not wait, on a store that answers when the test says so: a table with another way of being asked. What
 * is said is compared with the calls that wait, on a table of their own under the same clock. */
#include "core/core.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define NOW_US UINT64_C(1700000000000000)

/* ---- a store that answers later ---- */

typedef struct put {
    tg_op op;
    const tg_target *targets;
    size_t target_count;
    tg_result *results;
    tg_async_done *done;
    void *data;
    bool there;
} put;

enum { QUESTIONS = 64 };

typedef struct later {
    tg_store_async base;
    tg_store *store;
    put questions[QUESTIONS]; /* in a ring, without gaps but those of cancelled ones */
    size_t first, count;
} later;

static tg_store_ops later_ops;
static later *client_of_store; /* the one that is open */
static unsigned asked;       /* questions since it was opened */
static bool refuses;         /* nothing is begun */
static unsigned next_refused; /* so many answers are failures */

static tg_status
later_begin(tg_store_async *base, tg_op op, const tg_target *targets, size_t target_count, uint64_t until_us,
            tg_result *results, tg_async_done *done, void *data, tg_store_call **call, tg_error *error)
{
    later *one = (later *)base;
    (void)until_us; /* nothing here waits */
    *call = NULL;
    if (refuses)
        return tg__error(error, TG_E_STORE, "the test refuses");
    assert_true(one->count < QUESTIONS);
    put *new = &one->questions[(one->first + one->count++) % QUESTIONS];
    *new = (put){ op, targets, target_count, results, done, data, true };
    *call = (tg_store_call *)new;
    asked++;
    return TG_OK;
}

static void
later_cancel(tg_store_async *base, tg_store_call *call)
{
    (void)base;
    ((put *)call)->there = false;
}

static void
later_ready(tg_store_async *base, int fd, bool readable, bool writable)
{
    (void)base, (void)fd, (void)readable, (void)writable;
}

/* Answers everything that is asked by now; what is asked from within is left for the next time. */
static void
later_flush(tg_store_async *base)
{
    later *one = (later *)base;
    for (size_t left = one->count; left > 0; left--) {
        put told = one->questions[one->first];
        one->first = (one->first + 1) % QUESTIONS;
        one->count--;
        if (!told.there)
            continue;
        tg_error error;
        tg_status status = TG_E_STORE;
        if (next_refused > 0) {
            next_refused--;
            tg__error(&error, TG_E_STORE, "the test answers not");
        } else {
            status = one->store->ops->apply(one->store, told.op, told.targets, told.target_count, 0, told.results, NULL, &error);
        }
        told.done(told.data, status, &error);
        if (client_of_store != one)
            return; /* closed from within */
    }
}

static void
later_wake(tg_store_async *base)
{
    (void)base;
}

static void
later_close(tg_store_async *base)
{
    later *one = (later *)base;
    client_of_store = NULL;
    tg_error error;
    tg__error(&error, TG_E_STORE, "closed");
    for (; one->count > 0; one->count--) {
        put told = one->questions[one->first];
        one->first = (one->first + 1) % QUESTIONS;
        if (told.there)
            told.done(told.data, TG_E_STORE, &error);
    }
    tg_store_close(one->store);
    free(one);
}

static const tg_store_async_ops later_async_ops = {
    .begin = later_begin,
    .cancel = later_cancel,
    .ready = later_ready,
    .wake = later_wake,
    .flush = later_flush,
    .close = later_close,
};

static tg_status
later_open(tg_store *store, const tg_async_loop *loop, tg_store_async **client, tg_error *error)
{
    (void)loop, (void)error;
    later *one = calloc(1, sizeof *one);
    one->base.ops = &later_async_ops;
    one->store = store;
    tg__store_retain(store);
    client_of_store = one;
    asked = 0;
    *client = &one->base;
    return TG_OK;
}

/* ---- each test's world ---- */

static char folder[64], rules_path[96];
static tg_clock *the_clock;
static tg_store *waits, *answers_later;
static tg_async *client;

static tg_store *
store_under(const char *uri)
{
    tg_store *store;
    tg_error error;
    if (tg_store_open(tg_text_of(uri), &(tg_store_options){ .clock = the_clock }, &store, &error) != TG_OK)
        fail_msg("%s", error.message);
    return store;
}

static int
begin(void **unused)
{
    (void)unused;
    strcpy(folder, "/tmp/tidegate-async-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(rules_path, sizeof rules_path, "%s/rules.yaml", folder);
    unsetenv("TIDEGATE_STORE");
    tg_notice notice;
    while (tg_notice_take(&notice))
        ;
    assert_int_equal(tg_clock_open(NOW_US, &the_clock, NULL), TG_OK);
    waits = store_under("memory://waits");
    answers_later = store_under("memory://later");
    later_ops = *answers_later->ops;
    later_ops.async_open = later_open;
    answers_later->ops = &later_ops;
    refuses = false;
    next_refused = 0;
    const tg_async_loop loop = { .data = NULL }; /* nothing is asked of it */
    assert_int_equal(tg_async_open(answers_later, &loop, &client, NULL), TG_OK);
    return 0;
}

static int
end(void **unused)
{
    (void)unused;
    tg_async_close(client);
    tg_store_close(waits);
    tg_store_close(answers_later);
    tg_clock_close(the_clock);
    unlink(rules_path);
    rmdir(folder);
    return 0;
}

static void
answer_all(void)
{
    while (client_of_store && client_of_store->count > 0)
        tg_async_flush(client);
}

typedef struct heard {
    unsigned times;
    tg_status status;
    tg_error error;
    tg_async_call *call;
} heard;

static void
on_done(void *data, tg_status status, const tg_error *error)
{
    heard *one = data;
    one->times++;
    one->status = status;
    if (status != TG_OK)
        one->error = *error;
}

static tg_limiter *
limiter_on(tg_store *store, const char *rules, const char *name, tg_on_failure on_failure)
{
    tg_limiter *limiter;
    tg_error error;
    static const tg_text by[] = { { "ip", 2 } };
    const tg_limiter_options options = { .rules = tg_text_of(rules), .name = tg_text_of(name), .on_store_failure = on_failure,
                                         .by = by, .by_count = strcmp(name, "judging") == 0 };
    if (tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        fail_msg("%s", error.message);
    return limiter;
}

static tg_dimension
dimension_of(tg_part *part, const char *who)
{
    *part = (tg_part){ .value = tg_text_of(who) };
    return (tg_dimension){ part, 1 };
}

/* Whoever the result is of: texts and unused room apart. */
static void
assert_same_decision(const tg_decision *a, const tg_decision *b)
{
    assert_int_equal(a->allowed, b->allowed);
    assert_int_equal(a->degraded, b->degraded);
    assert_int_equal(a->overflow, b->overflow);
    assert_int_equal(a->reported, b->reported);
    assert_int_equal(a->limit, b->limit);
    assert_int_equal(a->remaining, b->remaining);
    assert_int_equal(a->retry_after_us, b->retry_after_us);
    assert_int_equal(a->reset_after_us, b->reset_after_us);
    assert_int_equal(a->delay_us, b->delay_us);
    assert_int_equal(a->result_count, b->result_count);
    for (size_t i = 0; i < a->result_count; i++) {
        const tg_result *left = &a->results[i], *right = &b->results[i];
        assert_memory_equal(left->rule.scope, right->rule.scope, sizeof left->rule.scope);
        assert_int_equal(left->allowed, right->allowed);
        assert_int_equal(left->charged, right->charged);
        assert_int_equal(left->limiter, right->limiter);
        assert_int_equal(left->cost, right->cost);
        assert_int_equal(left->remaining, right->remaining);
        assert_int_equal(left->retry_after_us, right->retry_after_us);
        assert_int_equal(left->stamp_us, right->stamp_us);
        const tg_identity *who = &a->identities[left->identity], *other = &b->identities[right->identity];
        assert_int_equal(who->length, other->length);
        assert_memory_equal(who->bytes, other->bytes, who->length);
    }
}

static size_t
notices(const char *code)
{
    tg_notice notice;
    size_t count = 0;
    while (tg_notice_take(&notice))
        count += strcmp(notice.code, code) == 0;
    return count;
}

/* ---- a limiter's own questions ---- */

static void
every_question_is_answered_as_by_the_call_that_waits(void **unused)
{
    (void)unused;
    static const char rules[] = "5/minute token_bucket; 8/hour sliding_log";
    tg_limiter *now = limiter_on(waits, rules, "x", TG_FAIL_OPEN), *then = limiter_on(answers_later, rules, "x", TG_FAIL_OPEN);
    static tg_decision expected, decision;
    tg_part part;
    unsigned seed = 7;
    for (int i = 0; i < 400; i++) {
        const char who[2] = { (char)('a' + rand_r(&seed) % 3), '\0' };
        const tg_dimension dimension = dimension_of(&part, who);
        const uint64_t cost = (uint64_t)rand_r(&seed) % 3;
        const tg_question kind = (tg_question)(rand_r(&seed) % 8);
        heard one = { 0 };
        tg_error error;
        const tg_question question = kind > TG_ASK_REFUND ? TG_ASK_HIT : kind;
        assert_int_equal(tg_limiter_begin(client, then, question, &dimension, 1, cost, 0, &decision, on_done, &one, &one.call,
                                          &error),
                         TG_OK);
        assert_non_null(one.call);
        assert_int_equal(one.times, 0);
        part.value = tg_text_of("borrowed for the beginning only");
        answer_all();
        assert_int_equal(one.times, 1);
        assert_int_equal(one.status, TG_OK);
        part.value = tg_text_of(who);
        switch (question) {
        case TG_ASK_HIT:
            tg_limiter_hit(now, &dimension, 1, cost, &expected, NULL);
            assert_same_decision(&decision, &expected);
            if (rand_r(&seed) % 4 == 0) {
                heard back = { 0 };
                assert_int_equal(tg_decision_refund_begin(client, &decision, on_done, &back, &back.call, &error), TG_OK);
                answer_all();
                assert_int_equal(back.times, back.call ? 1 : 0);
                assert_int_equal(tg_decision_refund(waits, &expected, NULL), TG_OK);
                assert_same_decision(&decision, &expected);
            }
            break;
        case TG_ASK_PEEK:
            tg_limiter_peek(now, &dimension, 1, cost, &expected, NULL);
            assert_same_decision(&decision, &expected);
            break;
        case TG_ASK_RESET: tg_limiter_reset(now, &dimension, 1, NULL); break;
        case TG_ASK_REFUND: tg_limiter_refund(now, &dimension, 1, cost, NULL); break;
        }
        tg_clock_advance_us(the_clock, (uint64_t)rand_r(&seed) % 10000000);
    }
    tg_limiter_close(now);
    tg_limiter_close(then);
}

static void
wrong_arguments_are_told_by_the_beginning(void **unused)
{
    (void)unused;
    tg_limiter *then = limiter_on(answers_later, "5/minute", "x", TG_FAIL_OPEN);
    tg_limiter *elsewhere = limiter_on(waits, "5/minute", "x", TG_FAIL_OPEN);
    static tg_decision decision;
    tg_part part;
    tg_error error;
    const tg_dimension dimension = dimension_of(&part, "a");
    heard one = { 0 };
    assert_int_equal(tg_limiter_begin(client, then, TG_ASK_HIT, &dimension, 0, 1, 0, &decision, on_done, &one, &one.call, &error),
                     TG_E_ARG);
    assert_int_equal(tg_limiter_begin(client, then, TG_ASK_HIT, &dimension, 1, TG_LIMIT_MAX + 1, 0, &decision, on_done, &one,
                                      &one.call, &error),
                     TG_E_ARG);
    assert_int_equal(tg_limiter_begin(client, elsewhere, TG_ASK_HIT, &dimension, 1, 1, 0, &decision, on_done, &one, &one.call,
                                      &error),
                     TG_E_ARG);
    assert_non_null(strstr(error.message, "memory://later"));
    assert_null(one.call);
    tg_async *none;
    assert_int_equal(tg_async_open(waits, &(tg_async_loop){ .data = NULL }, &none, &error), TG_E_UNSUPPORTED);
    answer_all();
    assert_int_equal(one.times, 0);
    tg_limiter_close(then);
    tg_limiter_close(elsewhere);
}

static void
a_failing_store_is_answered_by_policy_and_told_once(void **unused)
{
    (void)unused;
    static const tg_on_failure policies[] = { TG_FAIL_OPEN, TG_FAIL_CLOSED, TG_FAIL_LOCAL };
    for (size_t i = 0; i < 3; i++)
        for (int at_once = 0; at_once < 2; at_once++) {
            tg_limiter *then = limiter_on(answers_later, "2/minute", "x", policies[i]);
            static tg_decision decision;
            tg_part part;
            tg_error error;
            const tg_dimension dimension = dimension_of(&part, "a");
            for (int k = 0; k < 3; k++) {
                heard one = { 0 };
                refuses = at_once;
                next_refused = 1;
                memset(&decision, 0xAA, sizeof decision);
                assert_int_equal(tg_limiter_begin(client, then, TG_ASK_HIT, &dimension, 1, 1, 0, &decision, on_done, &one,
                                                  &one.call, &error),
                                 TG_OK);
                assert_int_equal(one.call == NULL, at_once);
                answer_all();
                assert_int_equal(one.times, at_once ? 0 : 1);
                assert_int_equal(one.status, TG_OK);
                assert_true(decision.degraded);
                assert_int_equal(decision.allowed, policies[i] == TG_FAIL_OPEN || (policies[i] == TG_FAIL_LOCAL && k < 2));
            }
            heard one = { 0 };
            const tg_status begun = tg_limiter_begin(client, then, TG_ASK_RESET, &dimension, 1, 0, 0, NULL, on_done, &one,
                                                     &one.call, &error);
            next_refused = 1;
            answer_all();
            assert_int_equal(at_once ? begun : one.status, TG_E_STORE);
            refuses = false;
            next_refused = 0;
            tg_limiter_close(then);
        }
    assert_int_equal(notices("store-failing"), 1);
}

static void
a_cancelled_call_is_never_done_and_leaves_nothing(void **unused)
{
    (void)unused;
    tg_limiter *then = limiter_on(answers_later, "5/minute token_bucket", "x", TG_FAIL_OPEN);
    static tg_decision decisions[3];
    tg_part part;
    const tg_dimension dimension = dimension_of(&part, "a");
    heard calls[3] = { 0 };
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(tg_limiter_begin(client, then, TG_ASK_HIT, &dimension, 1, 1, 0, &decisions[i], on_done, &calls[i],
                                          &calls[i].call, NULL),
                         TG_OK);
    tg_async_cancel(client, calls[1].call);
    answer_all();
    assert_int_equal(calls[0].times, 1);
    assert_int_equal(calls[1].times, 0);
    assert_int_equal(calls[2].times, 1);
    tg_limiter_close(then);
}

static void
closing_the_client_ends_every_call_as_degraded_and_blames_no_store(void **unused)
{
    (void)unused;
    tg_limiter *then = limiter_on(answers_later, "5/minute token_bucket", "x", TG_FAIL_CLOSED);
    static tg_decision decisions[3];
    tg_part part;
    const tg_dimension dimension = dimension_of(&part, "a");
    heard calls[3] = { 0 };
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(tg_limiter_begin(client, then, TG_ASK_HIT, &dimension, 1, 1, 0, &decisions[i], on_done, &calls[i],
                                          &calls[i].call, NULL),
                         TG_OK);
    tg_async_close(client);
    client = NULL;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(calls[i].times, 1);
        assert_int_equal(calls[i].status, TG_OK);
        assert_true(decisions[i].degraded && !decisions[i].allowed);
    }
    assert_int_equal(notices("store-failing"), 0);
    tg_limiter_close(then);
}

typedef struct chain {
    heard first, second;
    tg_limiter *limiter;
    tg_decision decisions[2];
    int what;
} chain;

static void
on_chained(void *data, tg_status status, const tg_error *error)
{
    chain *one = data;
    on_done(&one->first, status, error);
    tg_part part;
    const tg_dimension dimension = dimension_of(&part, "b");
    if (one->what == 1) {
        tg_async *closing = client;
        client = NULL;
        tg_async_close(closing);
        return;
    }
    assert_int_equal(tg_limiter_begin(client, one->limiter, TG_ASK_HIT, &dimension, 1, 1, 0, &one->decisions[1], on_done,
                                      &one->second, &one->second.call, NULL),
                     TG_OK);
    if (one->what == 2)
        tg_async_cancel(client, one->second.call);
}

static void
an_answer_may_begin_cancel_and_close(void **unused)
{
    (void)unused;
    static const int order[] = { 0, 2, 1 };
    for (size_t i = 0; i < 3; i++) {
        static chain one;
        one = (chain){ .limiter = limiter_on(answers_later, "5/minute", "x", TG_FAIL_OPEN), .what = order[i] };
        tg_part part;
        const tg_dimension dimension = dimension_of(&part, "a");
        assert_int_equal(tg_limiter_begin(client, one.limiter, TG_ASK_HIT, &dimension, 1, 1, 0, &one.decisions[0], on_chained,
                                          &one, &one.first.call, NULL),
                         TG_OK);
        tg_async_flush(client);
        assert_int_equal(one.first.times, 1);
        answer_all();
        assert_int_equal(one.second.times, one.what == 0);
        tg_limiter_close(one.limiter);
    }
}

/* ---- requests ---- */

static tg_gate *
gate_on(const char *uri)
{
    tg_gate *gate;
    tg_error error;
    const tg_gate_options options = { .path = tg_text_of(rules_path), .store = tg_text_of(uri), .clock = the_clock };
    if (tg_gate_open(&options, &gate, &error) != TG_OK)
        fail_msg("%s", error.message);
    return gate;
}

static void
write_rules(const char *yaml)
{
    FILE *file = fopen(rules_path, "w");
    assert_non_null(file);
    assert_true(fputs(yaml, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static const char everything[] =
    "exempt: [203.0.113.7]\n"
    "policies:\n"
    "  - {name: forbidden, also: true, match: {path: /closed}, deny: [203.0.113.8], rules: 100/minute}\n"
    "  - {name: excepted, also: true, exempt: [203.0.113.9], rules: 100/minute token_bucket, log_decisions: all}\n"
    "  - {name: enforced, also: true, rules: [6/minute token_bucket, 20/hour sliding_log], count: {status: 401}}\n"
    "  - {name: weighed, also: true, by: user, missing_identity: shared, rules: 30/minute sliding_counter,\n"
    "     cost: {response_header: X-Cost, reserve: 2, max: 9}}\n"
    "  - {name: heavy, also: true, match: {path: \"/form*\"}, by: [ip, \"form:account\"], rules: 9/minute,\n"
    "     missing_identity: shared}\n"
    "  - {name: ailing, also: true, rules: 4/minute token_bucket,\n"
    "     pause_when: error_rate > 45% over 20s min 5}\n"
    "  - {name: proof, also: true, mode: challenge, rules: 4/minute token_bucket}\n"
    "  - {name: trial, mode: shadow, rules: 3/minute token_bucket}\n";

static tg_request
some_request(unsigned *seed, char path[32], char peer[32], bool *form)
{
    static const char *const paths[] = { "/", "/closed", "/form", "/other" };
    static const char *const peers[] = { "203.0.113.7", "203.0.113.8", "203.0.113.9", "192.0.2.1", "192.0.2.2", "192.0.2.3" };
    strcpy(path, paths[rand_r(seed) % 4]);
    strcpy(peer, peers[rand_r(seed) % 6]);
    *form = strcmp(path, "/form") == 0;
    return (tg_request){
        .method = tg_text_of(*form ? "POST" : "GET"),
        .path = tg_text_of(path),
        .peer = tg_text_of(peer),
        .user = tg_text_of(rand_r(seed) % 2 ? "u" : ""),
        .peek = rand_r(seed) % 8 == 0,
        .body_follows = *form,
    };
}

static void
assert_same_judgement(const tg_judgement *a, const tg_judgement *b)
{
    assert_int_equal(a->outcome, b->outcome);
    assert_int_equal(a->status, b->status);
    assert_string_equal(a->policy, b->policy);
    assert_string_equal(a->missing, b->missing);
    assert_string_equal(a->shadow_policy, b->shadow_policy);
    assert_int_equal(a->challenged, b->challenged);
    assert_int_equal(a->shadow_denied, b->shadow_denied);
    assert_int_equal(a->needs_body, b->needs_body);
    assert_int_equal(a->settles, b->settles);
    assert_same_decision(&a->decision, &b->decision);
}

static void
assert_same_answer(const tg_answer *a, const tg_answer *b)
{
    assert_int_equal(a->status, b->status);
    assert_int_equal(a->field_count, b->field_count);
    for (size_t i = 0; i < a->field_count; i++) {
        assert_int_equal(a->fields[i].value.length, b->fields[i].value.length);
        assert_memory_equal(a->fields[i].value.data, b->fields[i].value.data, a->fields[i].value.length);
    }
    assert_int_equal(a->body.length, b->body.length);
}

static void
judge_later(tg_gate *gate, const tg_request *request, const tg_decision *const *prior, size_t prior_count,
            tg_judgement *judgement, tg_answer *answer)
{
    heard one = { 0 };
    tg_error error;
    if (tg_gate_judge_begin(client, gate, request, 1, prior, prior_count, judgement, answer, on_done, &one, &one.call, &error) !=
        TG_OK)
        fail_msg("%s", error.message);
    const bool waits_for_it = one.call != NULL;
    answer_all();
    assert_int_equal(one.times, waits_for_it ? 1 : 0);
    assert_int_equal(one.status, TG_OK);
}

static int
by_policy(const void *a, const void *b)
{
    return strcmp(((const tg_policy_metrics *)a)->policy, ((const tg_policy_metrics *)b)->policy);
}

static size_t
metrics_of(tg_store *store, tg_policy_metrics policies[16])
{
    size_t count;
    tg_latency_metrics latency;
    assert_int_equal(tg_store_read_metrics(store, policies, 16, &count, &latency, NULL), TG_OK);
    assert_true(count <= 16);
    qsort(policies, count, sizeof *policies, by_policy);
    uint64_t measured = 0;
    for (size_t i = 0; i < TG_LATENCIES; i++)
        measured += latency.counts[i];
    assert_true(measured > 0);
    return count;
}

static void
a_file_judges_settles_and_counts_as_where_the_store_is_waited_for(void **unused)
{
    (void)unused;
    write_rules(everything);
    tg_gate *now = gate_on("memory://waits"), *then = gate_on("memory://later");
    unsigned seed = 11, most = 0;
    for (int i = 0; i < 2000; i++) {
        static tg_judgement expected[2], judged[2];
        static tg_answer expected_answer, answer;
        char path[32], peer[32];
        bool form;
        tg_request request = some_request(&seed, path, peer, &form);
        size_t last = 0;
        const unsigned before = asked;
        assert_int_equal(tg_gate_judge(now, &request, 1, NULL, 0, &expected[0], &expected_answer, NULL), TG_OK);
        judge_later(then, &request, NULL, 0, &judged[0], &answer);
        assert_same_judgement(&judged[0], &expected[0]);
        if (judged[0].needs_body) {
            const tg_header type = { tg_text_of("Content-Type"), tg_text_of("application/x-www-form-urlencoded") };
            request.headers = &type;
            request.header_count = 1;
            request.body = tg_text_of(i % 2 ? "account=bob" : "account=eve");
            request.body_read = true;
            const tg_decision *const prior[] = { &expected[0].decision }, *const later_prior[] = { &judged[0].decision };
            assert_int_equal(tg_gate_judge(now, &request, 1, prior, 1, &expected[1], &expected_answer, NULL), TG_OK);
            judge_later(then, &request, later_prior, 1, &judged[1], &answer);
            assert_same_judgement(&judged[1], &expected[1]);
            last = 1;
        }
        assert_same_answer(&answer, &expected_answer);
        most = asked - before > most ? asked - before : most;
        if (judged[last].settles) {
            char cost[8];
            snprintf(cost, sizeof cost, "%d", rand_r(&seed) % 6);
            const tg_header header = { tg_text_of("X-Cost"), tg_text_of(cost) };
            const int status = rand_r(&seed) % 3 == 0 ? 401 : rand_r(&seed) % 2 ? 200 : 500;
            heard one = { 0 };
            assert_int_equal(tg_gate_settle(now, &expected[last], status, &header, 1, NULL), TG_OK);
            assert_int_equal(tg_gate_settle_begin(client, then, &judged[last], status, &header, 1, on_done, &one, &one.call, NULL),
                             TG_OK);
            assert_false(judged[last].settles);
            answer_all();
            assert_int_equal(one.status, TG_OK);
            assert_int_equal(one.times, one.call ? 1 : 0);
            assert_same_judgement(&judged[last], &expected[last]);
        }
        tg_clock_advance_us(the_clock, (uint64_t)rand_r(&seed) % 2000000);
    }
    assert_int_equal(most, 5); /* one before the body is there, four kinds of policies after: all were met */
    static tg_policy_metrics expected[16], counted[16];
    const size_t count = metrics_of(waits, expected);
    assert_int_equal(metrics_of(answers_later, counted), count);
    uint64_t paused = 0;
    for (size_t i = 0; i < count; i++) {
        paused += counted[i].counts[TG_METRIC_PAUSED];
        assert_string_equal(counted[i].policy, expected[i].policy);
        for (size_t k = 0; k < TG_METRICS; k++)
            if (counted[i].counts[k] != expected[i].counts[k])
                fail_msg("%s %s: %lu, expected %lu", counted[i].policy, tg_metric_word((tg_metric)k),
                         (unsigned long)counted[i].counts[k], (unsigned long)expected[i].counts[k]);
    }
    assert_true(paused > 0);
    tg_gate_close(now);
    tg_gate_close(then);
}

static void
a_judgement_whose_second_question_fails_keeps_what_the_first_has_said(void **unused)
{
    (void)unused;
    write_rules("policies:\n"
                "  - {name: enforced, also: true, rules: 6/minute token_bucket}\n"
                "  - {name: trial, mode: shadow, rules: 3/minute token_bucket}\n");
    tg_gate *gate = gate_on("memory://later");
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    static tg_judgement judgement;
    heard one = { 0 };
    assert_int_equal(tg_gate_judge_begin(client, gate, &request, 1, NULL, 0, &judgement, NULL, on_done, &one, &one.call, NULL),
                     TG_OK);
    tg_async_flush(client);
    assert_int_equal(one.times, 0);
    next_refused = 1;
    answer_all();
    assert_int_equal(one.times, 1);
    assert_int_equal(judgement.outcome, TG_ALLOWED);
    assert_false(judgement.decision.degraded);
    assert_int_equal(judgement.decision.remaining, 5);
    tg_gate_close(gate);
}

static void
the_rules_at_the_beginning_hold_until_the_answer(void **unused)
{
    (void)unused;
    write_rules("policies:\n  - {name: one, also: true, rules: 6/minute token_bucket}\n"
                "  - {name: two, mode: challenge, rules: 9/minute}\n");
    tg_gate *gate = gate_on("memory://later");
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    static tg_judgement first, second;
    static tg_answer answer;
    heard one = { 0 }, other = { 0 };
    assert_int_equal(tg_gate_judge_begin(client, gate, &request, 1, NULL, 0, &first, &answer, on_done, &one, &one.call, NULL),
                     TG_OK);
    write_rules("policies:\n  - {name: other, rules: 2/minute token_bucket}\n");
    for (int i = 0; i < 3; i++)
        assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    assert_int_equal(tg_gate_judge_begin(client, gate, &request, 1, NULL, 0, &second, NULL, on_done, &other, &other.call, NULL),
                     TG_OK);
    answer_all();
    assert_string_equal(first.policy, "one");
    assert_int_equal(first.decision.limit, 6);
    assert_string_equal(second.policy, "other");
    /* And not longer: else the sixteenth reading would have no place. */
    for (int i = 0; i < 40; i++) {
        heard begun = { 0 };
        assert_int_equal(tg_gate_judge_begin(client, gate, &request, 1, NULL, 0, &first, NULL, on_done, &begun, &begun.call, NULL),
                         TG_OK);
        assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
        if (i % 2)
            tg_async_cancel(client, begun.call);
        else
            answer_all();
        assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    }
    answer_all();
    tg_gate_close(gate);
}

static void
limiters_judge_a_request_without_waiting(void **unused)
{
    (void)unused;
    tg_limiter *limiter = limiter_on(answers_later, "2/minute token_bucket", "judging", TG_FAIL_OPEN);
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    const tg_request preflight = { .method = tg_text_of("OPTIONS"), .path = tg_text_of("/"),
                                   .headers = (const tg_header[]){ { { "Origin", 6 }, { "x", 1 } },
                                                                   { { "Access-Control-Request-Method", 29 }, { "GET", 3 } } },
                                   .header_count = 2 };
    static tg_judgement judgement;
    heard one = { 0 };
    assert_int_equal(tg_limiters_judge_begin(client, &limiter, 1, &preflight, 1, NULL, 0, &judgement, on_done, &one, &one.call,
                                             NULL),
                     TG_OK);
    assert_null(one.call);
    assert_int_equal(judgement.outcome, TG_UNMATCHED);
    for (int i = 0; i < 3; i++) {
        one = (heard){ 0 };
        assert_int_equal(tg_limiters_judge_begin(client, &limiter, 1, &request, 1, NULL, 0, &judgement, on_done, &one, &one.call,
                                                 NULL),
                         TG_OK);
        answer_all();
        assert_int_equal(one.times, 1);
        assert_int_equal(judgement.status, i < 2 ? 0 : 429);
    }
    tg_limiter_close(limiter);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_question_is_answered_as_by_the_call_that_waits, begin, end),
        cmocka_unit_test_setup_teardown(wrong_arguments_are_told_by_the_beginning, begin, end),
        cmocka_unit_test_setup_teardown(a_failing_store_is_answered_by_policy_and_told_once, begin, end),
        cmocka_unit_test_setup_teardown(a_cancelled_call_is_never_done_and_leaves_nothing, begin, end),
        cmocka_unit_test_setup_teardown(closing_the_client_ends_every_call_as_degraded_and_blames_no_store, begin, end),
        cmocka_unit_test_setup_teardown(an_answer_may_begin_cancel_and_close, begin, end),
        cmocka_unit_test_setup_teardown(a_file_judges_settles_and_counts_as_where_the_store_is_waited_for, begin, end),
        cmocka_unit_test_setup_teardown(a_judgement_whose_second_question_fails_keeps_what_the_first_has_said, begin, end),
        cmocka_unit_test_setup_teardown(the_rules_at_the_beginning_hold_until_the_answer, begin, end),
        cmocka_unit_test_setup_teardown(limiters_judge_a_request_without_waiting, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
