/* Out of memory: the n-th allocation fails, for n = 1, 2, ... until none does. Each failure is a status, and nothing
 * is lost.
 *
 * test-builds: plain The program brings its own malloc; so do the sanitizers. */
#include "config/config.h"
#include "identity/identity.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void __libc_free(void *memory);

static long failing_at; /* this allocation fails, counted from 1; 0: none */
static long allocations;
static long held; /* allocated and not given back since the count began */

/* Also for the libraries: what libyaml and the C library ask for fails as well. */
#define EXPORTED __attribute__((visibility("default")))

static bool
fails(void)
{
    return ++allocations == failing_at;
}

EXPORTED void *
malloc(size_t size)
{
    void *taken = fails() ? NULL : __libc_malloc(size);
    held += taken != NULL;
    return taken;
}

EXPORTED void *
calloc(size_t count, size_t size)
{
    void *taken = fails() ? NULL : __libc_calloc(count, size);
    held += taken != NULL;
    return taken;
}

EXPORTED void *
realloc(void *old, size_t size)
{
    void *taken = fails() ? NULL : __libc_realloc(old, size);
    held += !old && taken;
    return taken;
}

EXPORTED void
free(void *memory)
{
    held -= memory != NULL;
    __libc_free(memory);
}

static const char rules[] = "store: memory://no-memory\nnamespace: shop\ntrusted_proxies: [10.0.0.0/8, \"unix:\"]\n"
                            "client_header: Forwarded\nuser_header: X-User\n"
                            "defaults: {on_store_failure: closed}\n"
                            "policies:\n"
                            "  - name: login\n    match: {path: [/login, \"/a/*/b\"], methods: [GET, POST], host: a.example}\n"
                            "    rules: [5/minute, 50/day]\n    by: [ip, \"user|header:X-Key\"]\n"
                            "  - {name: api, rules: 100/second burst 200 token_bucket, also: true}\n";

static tg_status
read_config(void)
{
    tg_config *config;
    const tg_status status = tg__config_parse(tg_text_of(rules), "rules.yaml", &config, NULL);
    if (status == TG_OK)
        tg__config_close(config);
    return status;
}

static tg_status
open_client(void)
{
    static const tg_text trusted[] = { { "10.0.0.0/8", 10 }, { "::1", 3 } };
    const tg_client_options options = { .trusted_proxies = trusted, .trusted_proxy_count = 2 };
    tg_client *client;
    const tg_status status = tg_client_open(&options, &client, NULL);
    if (status == TG_OK)
        tg_client_close(client);
    return status;
}

static tg_status
parse_by(void)
{
    tg_by *by;
    const tg_status status = tg__by_parse(tg_text_of("user|header:X-Key|ip+path"), &by, NULL);
    if (status == TG_OK)
        tg__by_close(by);
    return status;
}

static char rules_path[64];

static tg_status
open_gate_and_reload(void)
{
    tg_gate *gate;
    tg_limiter *limiter;
    const tg_gate_options options = { .path = tg_text_of(rules_path) };
    tg_status status = tg_gate_open(&options, &gate, NULL);
    if (status != TG_OK)
        return status;
    status = tg_gate_reload(gate, NULL);
    if (status == TG_OK)
        status = tg_gate_limiter(gate, tg_text_of("login"), &limiter, NULL);
    if (status == TG_OK)
        tg_limiter_close(limiter);
    /* Whatever the reload said, the gate judges. */
    const tg_request request = { .path = tg_text_of("/"), .peer = tg_text_of("192.0.2.1") };
    tg_judgement judgement;
    if (tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL) != TG_OK)
        status = TG_E_ARG;
    tg_gate_close(gate);
    return status;
}

static void
survive(tg_status (*run)(void))
{
    assert_int_equal(run(), TG_OK); /* what the process allocates once and keeps is allocated now */
    long n = 0;
    tg_status status;
    do {
        allocations = 0;
        failing_at = ++n;
        const long before = held;
        status = run();
        failing_at = 0;
        /* SYSTEM where the C library had no memory for a call of ours */
        if (status != TG_OK && status != TG_E_NOMEM && status != TG_E_SYSTEM)
            fail_msg("allocation %ld: %s", n, tg_status_name(status));
        if (held != before)
            fail_msg("allocation %ld: %ld blocks are lost", n, held - before);
    } while (status != TG_OK && n < 10000);
    assert_in_range(n, 2, 9999);
}

static void
reading_a_rules_file_survives_each_failed_allocation(void **unused)
{
    (void)unused;
    survive(read_config);
}

static void
client_options_survive_each_failed_allocation(void **unused)
{
    (void)unused;
    survive(open_client);
    survive(parse_by);
}

static void
a_gate_survives_each_failed_allocation(void **unused)
{
    (void)unused;
    strcpy(rules_path, "/tmp/tidegate-memory-XXXXXX");
    const int fd = mkstemp(rules_path);
    assert_true(fd != -1);
    assert_int_equal(write(fd, rules, sizeof rules - 1), sizeof rules - 1);
    close(fd);
    survive(open_gate_and_reload);
    unlink(rules_path);
}

static void
judging_allocates_nothing(void **unused)
{
    (void)unused;
    tg_gate *gate;
    strcpy(rules_path, "/tmp/tidegate-memory-XXXXXX");
    const int fd = mkstemp(rules_path);
    assert_true(fd != -1);
    assert_int_equal(write(fd, rules, sizeof rules - 1), sizeof rules - 1);
    close(fd);
    const tg_gate_options options = { .path = tg_text_of(rules_path) };
    assert_int_equal(tg_gate_open(&options, &gate, NULL), TG_OK);
    static char user[1000];
    memset(user, 'u', sizeof user);
    const tg_header headers[] = { { tg_text_of("X-Key"), tg_text_of("k") },
                                  { tg_text_of("Forwarded"), tg_text_of("for=192.0.2.1, for=10.0.0.3") } };
    static const char *const paths[] = { "/login", "/a/x/b", "/other", "//%6Cogin?x" };
    allocations = 0;
    for (int i = 0; i < 1000; i++) {
        const tg_request request = { .method = tg_text_of("GET"), .path = tg_text_of(paths[i % 4]),
                                     .host = tg_text_of("a.example"), .peer = tg_text_of("10.0.0.2"),
                                     .user = { user, i % 3 ? sizeof user : 0 }, .headers = headers, .header_count = 2 };
        tg_judgement judgement;
        tg_answer answer;
        assert_int_equal(tg_gate_judge(gate, &request, 1, NULL, 0, &judgement, NULL, NULL), TG_OK);
        tg_answer_make(&judgement, &answer);
    }
    assert_int_equal(allocations, 0);
    tg_gate_close(gate);
    unlink(rules_path);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reading_a_rules_file_survives_each_failed_allocation),
        cmocka_unit_test(client_options_survive_each_failed_allocation),
        cmocka_unit_test(a_gate_survives_each_failed_allocation),
        cmocka_unit_test(judging_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
