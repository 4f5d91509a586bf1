/* Compiled rules: what is read from them is what was written, and nothing else is ever read. */
#include "config/compiled.h"
#include "config/match.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

enum { DIGEST_AT = 28, HEAD_BYTES = 44 };

static char folder[] = "/tmp/tg-compiled-XXXXXX";

static const char *
in_folder(const char *name)
{
    static char paths[4][200];
    static size_t next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void
write_file(const char *name, const char *text, size_t length)
{
    const int fd = open(in_folder(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_int_not_equal(fd, -1);
    assert_int_equal(write(fd, text, length), length);
    close(fd);
}

static const char MAIN[] = "# the shop\n"
                           "include: more.yaml\n"
                           "store: \"shared://${TG_TEST_STORE}\"\n"
                           "trusted_proxies: [127.0.0.1/32, \"unix:\"]\n"
                           "defaults: {on_store_failure: closed, body: problem, texts: {denied: \"slow\\u0020down\"}}\n"
                           "policies:\n"
                           "  - name: login\n"
                           "    match: {path: /login, methods: [POST]}\n"
                           "    rules:\n"
                           "      - 5/minute\n"
                           "      - 50/day\n"
                           "    by: [ip, \"user|ip\"]\n"
                           "  - name: api\n"
                           "    match: {path: '/api/*', header: {X-Beta: \"1\"}}\n"
                           "    rules: 100/second burst 200 token_bucket\n"
                           "    exempt: [10.1.0.0/16]\n";
static const char MORE[] = "policies:\n  - name: rest\n    rules: deny\n    by: ip\nunmatched: {rules: 9/minute}\n";

static int
set_up(void **unused)
{
    (void)unused;
    setenv("TG_TEST_STORE", "shop", 1);
    write_file("rules.yaml", MAIN, sizeof MAIN - 1);
    write_file("more.yaml", MORE, sizeof MORE - 1);
    tg_error error;
    if (tg_rules_compile(in_folder("rules.yaml"), in_folder("rules.compiled"), &error) != TG_OK)
        fail_msg("%s", error.message);
    return 0;
}

static tg_config *
read_rules(const char *name)
{
    tg_config *config;
    tg_error error;
    if (tg__config_read(in_folder(name), &config, &error) != TG_OK)
        fail_msg("%s", error.message);
    return config;
}

static void
compiled_rules_say_what_their_sources_said(void **unused)
{
    (void)unused;
    tg_config *written = read_rules("rules.yaml");
    unsetenv("TG_TEST_STORE"); /* it went in */
    tg_config *compiled = read_rules("rules.compiled");
    assert_string_equal(compiled->store, "shared://shop");
    assert_string_equal(compiled->path, written->path);
    assert_int_equal(compiled->store_line, 3);
    assert_int_equal(compiled->file_count, 1);
    assert_string_equal(compiled->files[0], in_folder("rules.compiled"));
    assert_int_equal(compiled->trusted_proxy_count, 2);
    assert_int_equal(compiled->policy_count, 4);
    for (size_t i = 0; i < 4; i++) {
        const tg_policy *a = &written->policies[i], *b = &compiled->policies[i];
        assert_string_equal(a->name, b->name);
        assert_string_equal(a->file, b->file);
        assert_string_equal(a->rules_text, b->rules_text);
        assert_int_equal(a->line, b->line);
        assert_int_equal(a->rule_count, b->rule_count);
        assert_memory_equal(a->rules, b->rules, sizeof a->rules);
        assert_int_equal(a->by_count, b->by_count);
        assert_int_equal(a->on_store_failure, b->on_store_failure);
        assert_int_equal(a->exempt.count, b->exempt.count);
        assert_int_equal(a->style.problem, b->style.problem);
        for (size_t k = 0; k < a->by_count; k++) {
            assert_int_equal(a->by_place[k].line, b->by_place[k].line);
            assert_int_equal(a->by_place[k].column, b->by_place[k].column);
        }
    }
    assert_int_equal(compiled->policies[0].style.texts[TG_DENIED].length, 9); /* the escape was undone once */
    assert_string_equal(compiled->policies[2].file, in_folder("more.yaml"));
    tg__config_close(written);
    tg__config_close(compiled);
    setenv("TG_TEST_STORE", "shop", 1);
}

static tg_text
bytes_of(const char *name, char *room, size_t size)
{
    const int fd = open(in_folder(name), O_RDONLY | O_CLOEXEC);
    const ssize_t got = read(fd, room, size);
    close(fd);
    assert_true(got > 0 && (size_t)got < size);
    return (tg_text){ room, (size_t)got };
}

static void
make_digest_right(char *bytes, size_t length)
{
    const tg_text rest[] = { { bytes, DIGEST_AT }, { bytes + HEAD_BYTES, length - HEAD_BYTES } };
    tg__digest(rest, 2, (uint8_t *)bytes + DIGEST_AT, HEAD_BYTES - DIGEST_AT);
}

/* Read or refused with a message; which of the two is told. */
static bool
is_read(const char *bytes, size_t length)
{
    tg_config *config;
    tg_error error = { 0 };
    char *exact = malloc(length ? length : 1); /* so that a sanitizer sees one byte too much */
    memcpy(exact, bytes, length);
    const tg_status status = tg__config_parse_compiled((tg_text){ exact, length }, "r.compiled", &config, &error);
    if (status == TG_OK)
        tg__config_close(config);
    else
        assert_true(status == TG_E_CONFIG && error.message[0]);
    free(exact);
    return status == TG_OK;
}

static void
compiled_rules_cut_off_anywhere_are_refused(void **unused)
{
    (void)unused;
    static char room[16384];
    const tg_text whole = bytes_of("rules.compiled", room, sizeof room);
    assert_true(is_read(room, whole.length));
    for (size_t length = 0; length < whole.length; length++)
        assert_false(is_read(room, length));
    room[whole.length] = 0;
    assert_false(is_read(room, whole.length + 1));
}

static void
a_changed_byte_is_refused_by_the_digest(void **unused)
{
    (void)unused;
    static char room[16384];
    const tg_text whole = bytes_of("rules.compiled", room, sizeof room);
    for (size_t i = 0; i < whole.length; i++) {
        room[i] ^= 0x41;
        assert_false(is_read(room, whole.length));
        room[i] ^= 0x41;
    }
}

static void
no_number_in_compiled_rules_leads_out_of_them(void **unused)
{
    (void)unused;
    static char room[16384], changed[16384];
    const tg_text whole = bytes_of("rules.compiled", room, sizeof room);
    static const uint32_t numbers[] = { 0, 1, 2, 0x7f, 0xff, 0x1ff, 0xffff, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff };
    const char *include = memmem(room, whole.length, "more.yaml", 9);
    assert_non_null(include);
    size_t refused = 0, tried = 0;
    for (size_t at = 8; at + 4 <= whole.length; at += 4) /* every word, also texts */
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
            memcpy(changed, room, whole.length);
            memcpy(changed + at, &numbers[i], 4);
            make_digest_right(changed, whole.length);
            refused += !is_read(changed, whole.length);
            tried++;
        }
    assert_true(tried > 1000 && refused > tried / 4);
}

static void
an_error_in_compiled_rules_names_the_source_and_its_line(void **unused)
{
    (void)unused;
    static char room[16384];
    const tg_text whole = bytes_of("rules.compiled", room, sizeof room);
    char *word = memmem(room, whole.length, "5/minute", 8);
    memcpy(word, "5/minote", 8);
    make_digest_right(room, whole.length);
    tg_config *config;
    tg_error error;
    assert_int_equal(tg__config_parse_compiled(whole, "r.compiled", &config, &error), TG_E_CONFIG);
    assert_int_equal(error.line, 10);
    assert_non_null(strstr(error.message, "rules.yaml:10:"));
}

static bool
has_changed(void)
{
    bool changed;
    char what[200];
    tg_error error;
    if (tg_rules_changed(in_folder("rules.compiled"), &changed, what, sizeof what, &error) != TG_OK)
        fail_msg("%s", error.message);
    return changed;
}

static void
a_source_that_changed_is_noticed_and_one_that_was_touched_is_not(void **unused)
{
    (void)unused;
    assert_false(has_changed());
    const struct timespec old[2] = { { .tv_sec = 1000 }, { .tv_sec = 1000 } };
    assert_int_equal(utimensat(AT_FDCWD, in_folder("more.yaml"), old, 0), 0);
    assert_false(has_changed()); /* other marks, the same text */
    write_file("more.yaml", "policies: []\n", 13);
    assert_true(has_changed());
    tg_notice notice;
    while (tg_notice_take(&notice)) {
    }
    tg__config_close(read_rules("rules.compiled")); /* and it stays in force */
    assert_true(tg_notice_take(&notice));
    assert_string_equal(notice.code, "rules-stale");
    assert_non_null(strstr(notice.message, "more.yaml"));
    unlink(in_folder("more.yaml"));
    assert_false(has_changed()); /* shipped alone */
    setenv("TG_TEST_STORE", "other", 1);
    assert_true(has_changed());
}

static void
another_version_is_refused_by_name(void **unused)
{
    (void)unused;
    static char room[16384];
    const tg_text whole = bytes_of("rules.compiled", room, sizeof room);
    room[8] = 9;
    tg_config *config;
    tg_error error;
    assert_int_equal(tg__config_parse_compiled(whole, "r.compiled", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "of version 9, expected 1"));
}

static void
a_wrong_rules_file_leaves_the_compiled_one_as_it_was(void **unused)
{
    (void)unused;
    struct stat before, since;
    tg_error error;
    assert_int_equal(stat(in_folder("rules.compiled"), &before), 0);
    assert_int_equal(before.st_mode & 07777, 0640); /* a variable's value stands in it */
    write_file("rules.yaml", "policies: [{name: a, rules: 5/minote}]\n", 39);
    assert_int_equal(tg_rules_compile(in_folder("rules.yaml"), in_folder("rules.compiled"), &error), TG_E_CONFIG);
    assert_int_equal(error.line, 1);
    assert_int_equal(stat(in_folder("rules.compiled"), &since), 0);
    assert_int_equal(before.st_ino, since.st_ino);
    assert_int_equal(tg_rules_compile(in_folder("rules.compiled"), in_folder("twice"), &error), TG_E_CONFIG);
    assert_int_equal(access(in_folder("twice"), F_OK), -1);
}

static int
remove_folder(void **unused)
{
    (void)unused;
    unlink(in_folder("rules.yaml"));
    unlink(in_folder("more.yaml"));
    unlink(in_folder("rules.compiled"));
    return rmdir(folder); /* nothing temporary is left */
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(compiled_rules_say_what_their_sources_said, set_up),
        cmocka_unit_test_setup(compiled_rules_cut_off_anywhere_are_refused, set_up),
        cmocka_unit_test_setup(a_changed_byte_is_refused_by_the_digest, set_up),
        cmocka_unit_test_setup(no_number_in_compiled_rules_leads_out_of_them, set_up),
        cmocka_unit_test_setup(an_error_in_compiled_rules_names_the_source_and_its_line, set_up),
        cmocka_unit_test_setup(a_source_that_changed_is_noticed_and_one_that_was_touched_is_not, set_up),
        cmocka_unit_test_setup(another_version_is_refused_by_name, set_up),
        cmocka_unit_test_setup(a_wrong_rules_file_leaves_the_compiled_one_as_it_was, set_up),
    };
    if (!mkdtemp(folder))
        return 1;
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
