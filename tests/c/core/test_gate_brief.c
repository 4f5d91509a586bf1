/* A gate for a process of one request: its limiters are made as they are met, and it opens without its store. */
#include "core/gate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static const char RULES[] = "policies:\n"
                            "  - {name: one, match: {path: /one}, rules: 1/hour, by: ip}\n"
                            "  - {name: two, match: {path: /two}, rules: 2/hour, by: user, count: {status: [401]}}\n"
                            "  - {name: shut, match: {path: /shut}, rules: 2/hour, on_store_failure: closed}\n";
static char path[] = "/tmp/tg-brief-XXXXXX";

static tg_gate *
opened(const char *store, bool brief)
{
    tg_gate *gate;
    tg_error error;
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(store), .brief = brief,
                                      .starts_anyway = true, .unwatched = true };
    if (tg_gate_open(&options, &gate, &error) != TG_OK)
        fail_msg("%s", error.message);
    return gate;
}

static tg_judgement
judged(tg_gate *gate, const char *asked)
{
    tg_judgement judgement;
    tg_error error;
    const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of(asked), .peer = tg_text_of("203.0.113.9"),
                                 .user = tg_text_of("ann") };
    if (tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, &error) != TG_OK)
        fail_msg("%s", error.message);
    return judgement;
}

static void
a_brief_gate_judges_as_any_other(void **unused)
{
    (void)unused;
    for (int brief = 0; brief < 2; brief++) {
        tg_gate *gate = opened(brief ? "memory://brief" : "memory://whole", brief == 1);
        assert_int_equal(judged(gate, "/none").outcome, TG_UNMATCHED);
        assert_int_equal(judged(gate, "/one").outcome, TG_ALLOWED);
        assert_int_equal(judged(gate, "/one").status, 429);
        assert_int_equal(judged(gate, "/two").decision.remaining, 1);
        tg_gate_close(gate);
    }
}

static void
what_no_request_has_met_is_not_there_and_does_not_matter(void **unused)
{
    (void)unused;
    tg_gate *gate = opened("memory://unmet", true);
    assert_false(tg_gate_names(gate, "user")); /* nobody has asked for it yet */
    tg_judgement judgement = judged(gate, "/one");
    judgement.settles = true;
    assert_int_equal(tg_gate_settle(gate, &judgement, 200, NULL, 0, NULL), TG_OK);
    judgement = judged(gate, "/two");
    assert_true(judgement.settles);
    assert_true(tg_gate_names(gate, "user"));
    assert_int_equal(tg_gate_settle(gate, &judgement, 200, NULL, 0, NULL), TG_OK); /* only a 401 counts: given back */
    assert_int_equal(judged(gate, "/two").decision.remaining, 1);
    assert_int_equal(tg_gate_reload(gate, NULL), TG_OK);
    assert_int_equal(judged(gate, "/one").status, 429);
    tg_gate_close(gate);
}

static void
a_store_that_cannot_be_opened_is_on_store_failures(void **unused)
{
    (void)unused;
    tg_notice notice;
    while (tg_notice_take(&notice)) {
    }
    tg_gate *gate = opened("shared:///not/there/table", true);
    const tg_judgement open = judged(gate, "/one"), shut = judged(gate, "/shut");
    assert_int_equal(open.status, 0);
    assert_true(open.decision.degraded);
    assert_int_equal(shut.status, 503);
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "store-failing");
    assert_non_null(strstr(notice.message, "/not/there"));
    tg_store_stats stats;
    assert_int_equal(tg_store_read_stats(tg_gate_store(gate), &stats, NULL), TG_E_STORE);
    tg_gate_close(gate);
}

static void
an_address_that_is_no_store_is_an_error_all_the_same(void **unused)
{
    (void)unused;
    tg_gate *gate;
    tg_error error;
    static const char *const wrong[] = { "nothing://x", "shared", "shared://a?size=1" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(wrong[i]), .starts_anyway = true };
        assert_int_equal(tg_gate_open(&options, &gate, &error), TG_E_CONFIG);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_brief_gate_judges_as_any_other),
        cmocka_unit_test(what_no_request_has_met_is_not_there_and_does_not_matter),
        cmocka_unit_test(a_store_that_cannot_be_opened_is_on_store_failures),
        cmocka_unit_test(an_address_that_is_no_store_is_an_error_all_the_same),
    };
    const int fd = mkstemp(path);
    if (fd == -1 || write(fd, RULES, sizeof RULES - 1) != (ssize_t)sizeof RULES - 1)
        return 1;
    close(fd);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
