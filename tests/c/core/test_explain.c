/* Explaining and checking in C: nothing is taken, nothing is made, nothing leaks, under reloads too. */
#include "tidegate.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char folder[64], path[96];

static int
make_folder(void **unused)
{
    (void)unused;
    unsetenv("TIDEGATE_CONFIG");
    unsetenv("TIDEGATE_STORE");
    strcpy(folder, "/tmp/tidegate-explain-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/rules.yaml", folder);
    return 0;
}

static int
remove_folder(void **unused)
{
    (void)unused;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static void
write_rules(const char *yaml)
{
    char temporary[128];
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE *file = fopen(temporary, "w");
    assert_non_null(file);
    assert_true(fputs(yaml, file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(temporary, path), 0);
}

static tg_gate *
opened(const char *yaml, const char *store, bool look)
{
    tg_gate *gate;
    tg_error error;
    write_rules(yaml);
    const tg_gate_options options = { .path = tg_text_of(path), .store = tg_text_of(store), .look = look };
    if (tg_gate_open(&options, &gate, &error) != TG_OK)
        fail_msg("%s", error.message);
    return gate;
}

static const tg_request home = { .method = { "GET", 3 }, .path = { "/", 1 }, .peer = { "192.0.2.1", 9 } };

static void
a_peek_decides_as_the_request_would_be_and_takes_nothing(void **unused)
{
    (void)unused;
    tg_gate *gate = opened("policies:\n  - {name: a, rules: 2/hour}\n", "memory://peeks", false);
    tg_request peeked = home;
    peeked.peek = true;
    for (int used = 0; used < 3; used++) {
        tg_judgement judgement;
        for (int i = 0; i < 3; i++) {
            assert_int_equal(tg_gate_judge(gate, &peeked, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
            assert_int_equal(judgement.outcome, used < 2 ? TG_ALLOWED : TG_DENIED);
            assert_int_equal(judgement.decision.remaining, used < 2 ? 2 - used : 0);
            assert_false(judgement.decision.results[0].charged);
        }
        assert_int_equal(tg_gate_judge(gate, &home, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        assert_int_equal(judgement.outcome, used < 2 ? TG_ALLOWED : TG_DENIED);
    }
    tg_gate_close(gate);
}

static void
a_store_opened_as_existing_is_never_made(void **unused)
{
    (void)unused;
    char uri[128], file[128];
    struct stat there;
    tg_store *store;
    tg_error error;
    snprintf(uri, sizeof uri, "shared://%s/existing", folder);
    snprintf(file, sizeof file, "%s/existing", folder);
    const tg_store_options options = { .existing = true };
    assert_int_equal(tg_store_open(tg_text_of(uri), &options, &store, &error), TG_E_SYSTEM);
    assert_int_equal(error.system_error, ENOENT);
    assert_int_equal(stat(file, &there), -1);
    assert_int_equal(tg_store_open(tg_text_of(uri), NULL, &store, &error), TG_OK);
    tg_store *again;
    assert_int_equal(tg_store_open(tg_text_of(uri), &options, &again, &error), TG_OK);
    tg_store_close(again);
    tg_store_close(store);
    assert_int_equal(tg_store_open(tg_text_of(uri), &options, &store, &error), TG_OK);
    tg_store_close(store);
}

static void
a_gate_that_looks_stands_in_for_a_table_that_is_not_there(void **unused)
{
    (void)unused;
    char uri[128], file[128];
    struct stat there;
    tg_explanation *explanation;
    snprintf(uri, sizeof uri, "shared://%s/looked", folder);
    snprintf(file, sizeof file, "%s/looked", folder);
    tg_gate *gate = opened("policies:\n  - {name: a, rules: 2/hour}\n", uri, true);
    assert_int_equal(tg_gate_explain(gate, &home, 1, &explanation, NULL), TG_OK);
    assert_true(explanation->store_missing);
    assert_string_equal(explanation->store, uri);
    assert_int_equal(explanation->judgement.decision.remaining, 2);
    tg_explanation_close(explanation);
    tg_gate_close(gate);
    assert_int_equal(stat(file, &there), -1);
}

static void
a_stores_password_is_not_shown(void **unused)
{
    (void)unused;
    tg_explanation *explanation;
    /* A memory store's name may not hold '@'; what stands in for a path may. */
    char uri[160];
    snprintf(uri, sizeof uri, "shared://%s/secret@host", folder);
    tg_gate *gate = opened("policies: []\n", uri, true);
    assert_int_equal(tg_gate_explain(gate, &home, 1, &explanation, NULL), TG_OK);
    assert_string_equal(explanation->store, "shared://***@host");
    tg_explanation_close(explanation);
    tg_gate_close(gate);
}

static void
identities_are_shown_as_keyed_with_what_may_be_secret_hidden(void **unused)
{
    (void)unused;
    tg_store *store;
    tg_limiter *limiter;
    tg_decision decision;
    char shown[400], other[400], cut[16], long_value[80];
    memset(long_value, 'x', sizeof long_value);
    assert_int_equal(tg_store_open(tg_text_of("memory://shown"), NULL, &store, NULL), TG_OK);
    assert_int_equal(tg_limiter_open(store, NULL, &(tg_limiter_options){ .rules = tg_text_of("9/hour") }, &limiter, NULL),
                     TG_OK);
    const tg_part parts[] = { { tg_text_of("ip"), tg_text_of("::ffff:192.0.2.1") },
                              { tg_text_of("header:x-key"), tg_text_of("swordfish") },
                              { tg_text_of("user"), { long_value, sizeof long_value } } };
    assert_int_equal(tg_limiter_hit(limiter, &(tg_dimension){ parts, 2 }, 1, 1, &decision, NULL), TG_OK);
    tg_identity_show(&decision.identities[0], shown, sizeof shown);
    assert_ptr_equal(strstr(shown, "ip 192.0.2.1 + header:x-key (hidden, 9 bytes, #"), shown);
    assert_null(strstr(shown, "swordfish"));
    tg_identity_show(&decision.identities[0], cut, sizeof cut);
    assert_int_equal(strlen(cut), sizeof cut - 1);
    assert_int_equal(tg_limiter_hit(limiter, &(tg_dimension){ parts + 2, 1 }, 1, 1, &decision, NULL), TG_OK);
    tg_identity_show(&decision.identities[0], shown, sizeof shown);
    assert_ptr_equal(strstr(shown, "user (over 64 bytes, #"), shown);
    /* Positional parts have no kind: they are a script's own, and may be anything. */
    const tg_part raw = { .value = tg_text_of("swordfish") };
    assert_int_equal(tg_limiter_hit(limiter, &(tg_dimension){ &raw, 1 }, 1, 1, &decision, NULL), TG_OK);
    tg_identity_show(&decision.identities[0], other, sizeof other);
    assert_null(strstr(other, "swordfish"));
    /* Bytes that are no identity end the text and nothing else. */
    for (unsigned length = 0; length <= TG_IDENTITY_BYTES_MAX; length++) {
        tg_identity broken = { .length = (uint16_t)length };
        memset(broken.bytes, (int)(length * 37 + 255), sizeof broken.bytes);
        tg_identity_show(&broken, shown, sizeof shown);
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
}

static void
put_piece(void *context, tg_text piece)
{
    fwrite(piece.data, 1, piece.length, context);
}

static void
what_a_client_sends_never_breaks_the_json(void **unused)
{
    (void)unused;
    tg_gate *gate = opened("policies:\n  - {name: a, match: {path: \"/x\\\"y\"}, rules: 2/hour}\n", "memory://odd", false);
    const tg_request odd = { .method = { "G\"\\\n", 4 }, .path = { "/\x01\xff\"\\", 5 }, .peer = { "\xff\n", 2 } };
    tg_explanation *explanation;
    assert_int_equal(tg_gate_explain(gate, &odd, 1, &explanation, NULL), TG_OK);
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&text, &size);
    tg_explanation_write(explanation, true, put_piece, memory);
    fclose(memory);
    for (size_t i = 0; i < size; i++)
        assert_true(text[i] == '\n' || (text[i] >= ' ' && text[i] <= '~'));
    free(text);
    tg_explanation_close(explanation);
    tg_gate_close(gate);
}

static atomic_bool done;

static void *
reload_all_the_time(void *gate)
{
    for (int i = 0; !atomic_load(&done); i++) {
        write_rules(i % 2 ? "policies:\n  - {name: a, rules: 2/hour}\n"
                          : "policies:\n  - {name: b, match: {path: /x}, rules: 2/hour}\n  - {name: c, rules: 5/hour}\n");
        tg_gate_reload(gate, NULL);
    }
    return NULL;
}

static void
an_explanation_is_of_one_reading_whatever_is_reloaded_meanwhile(void **unused)
{
    (void)unused;
    pthread_t thread;
    tg_gate *gate = opened("policies:\n  - {name: a, rules: 2/hour}\n", "memory://while", false);
    assert_int_equal(pthread_create(&thread, NULL, reload_all_the_time, gate), 0);
    for (int i = 0; i < 300; i++) {
        tg_explanation *explanation;
        assert_int_equal(tg_gate_explain(gate, &home, 1, &explanation, NULL), TG_OK);
        assert_int_equal(explanation->applied_count, 1);
        const tg_explained_policy *policy = &explanation->policies[explanation->applied[0]];
        assert_string_equal(policy->name, explanation->judgement.policy);
        assert_int_equal(explanation->judgement.decision.remaining, explanation->policy_count == 1 ? 2 : 5);
        tg_explanation_close(explanation);
    }
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    tg_gate_close(gate);
}

static void
more_warnings_than_there_is_room_for_are_counted(void **unused)
{
    (void)unused;
    tg_warning warnings[2];
    size_t count;
    tg_error error;
    write_rules("policies:\n  - {name: a, rules: 1/s, by: host}\n  - {name: b, rules: 1/s, by: host}\n"
                "  - {name: c, rules: 1/s, by: host}\n");
    const tg_check_options options = { .path = tg_text_of(path) };
    assert_int_equal(tg_check(&options, warnings, 2, &count, &error), TG_OK);
    assert_int_equal(count, 5);
    assert_int_equal(tg_check(&options, NULL, 0, &count, &error), TG_OK);
    assert_int_equal(count, 5);
    assert_int_equal(tg_check(&(tg_check_options){ .path = options.path, .face = tg_text_of("fax") }, warnings, 2, &count,
                              &error),
                     TG_E_ARG);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peek_decides_as_the_request_would_be_and_takes_nothing),
        cmocka_unit_test(a_store_opened_as_existing_is_never_made),
        cmocka_unit_test(a_gate_that_looks_stands_in_for_a_table_that_is_not_there),
        cmocka_unit_test(a_stores_password_is_not_shown),
        cmocka_unit_test(identities_are_shown_as_keyed_with_what_may_be_secret_hidden),
        cmocka_unit_test(what_a_client_sends_never_breaks_the_json),
        cmocka_unit_test(an_explanation_is_of_one_reading_whatever_is_reloaded_meanwhile),
        cmocka_unit_test(more_warnings_than_there_is_room_for_are_counted),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
