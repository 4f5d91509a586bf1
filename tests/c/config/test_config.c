/* The rules file: what is read, and each error at its place. */
#include "config/config.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))
#define POLICY "policies:\n  - name: a\n    rules: 5/minute\n" /* a good one, for lines 1 to 3; more keys from line 4 */

static tg_config *
parsed(const char *yaml)
{
    tg_config *config;
    tg_error error;
    if (tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error) != TG_OK)
        fail_msg("%s\n%s", error.message, yaml);
    return config;
}

static void
a_whole_file_is_read_as_written(void **unused)
{
    (void)unused;
    tg_config *config = parsed("# the shop\n"
                               "store: shared://shop\n"
                               "namespace: shop\n"
                               "trusted_proxies: [127.0.0.1/32, 10.0.0.0/8, \"unix:\"]\n"
                               "client_header: Forwarded\n"
                               "user_header: X-Remote-User\n"
                               "policies:\n"
                               "  - name: login\n"
                               "    match: {path: /login, methods: [POST, put], host: [Shop.Example, \"*.shop.example\"]}\n"
                               "    rules: 5/minute; 50/day\n"
                               "    by: [ip, \"user|ip\"]\n"
                               "    on_store_failure: closed\n"
                               "    on_full: open\n"
                               "    missing_identity: reject 400\n"
                               "    also: true\n"
                               "  - name: api\n"
                               "    match:\n"
                               "      path: \"/api/*\"\n"
                               "    rules:\n"
                               "      - 100/second burst 200 token_bucket\n"
                               "      - 10000/hour\n"
                               "    by: user|ip\n"
                               "  - {name: rest, rules: deny}\n"
                               "defaults: {on_store_failure: local, on_full: closed, missing_identity: shared}\n");
    assert_string_equal(config->path, "r.yaml");
    assert_string_equal(config->store, "shared://shop");
    assert_int_equal(config->store_line, 2);
    assert_string_equal(config->space, "shop");
    assert_int_equal(config->trusted_proxy_count, 3);
    assert_true(tg__text_is(config->trusted_proxies[2], "unix:"));
    assert_string_equal(config->client_header, "Forwarded");
    assert_string_equal(config->user_header, "X-Remote-User");
    assert_int_equal(config->policy_count, 3);
    const tg_policy *login = &config->policies[0], *api = &config->policies[1], *rest = &config->policies[2];
    assert_string_equal(login->name, "login");
    assert_int_equal(login->line, 8);
    assert_true(login->also);
    assert_non_null(login->match);
    assert_int_equal(login->rule_count, 2);
    assert_int_equal(login->rules[0].limit, 5);
    assert_string_equal(login->rules_text, "5/minute; 50/day");
    assert_int_equal(login->by_count, 2);
    assert_true(tg__text_is(login->by[1], "user|ip"));
    assert_int_equal(login->on_store_failure, TG_FAIL_CLOSED);
    assert_int_equal(login->on_full, TG_FULL_OPEN);
    assert_int_equal(login->missing_identity, TG_MISSING_REJECT_400);
    assert_string_equal(api->rules_text, "100/second burst 200 token_bucket; 10000/hour");
    assert_int_equal(api->rule_count, 2);
    assert_false(api->also);
    /* defaults count wherever they stand */
    assert_int_equal(api->on_store_failure, TG_FAIL_LOCAL);
    assert_int_equal(api->on_full, TG_FULL_CLOSED);
    assert_int_equal(api->missing_identity, TG_MISSING_SHARED);
    assert_null(rest->match);
    assert_int_equal(rest->rules[0].algorithm, TG_DENY);
    assert_int_equal(rest->by_count, 1);
    assert_true(tg__text_is(rest->by[0], "ip"));
    assert_int_equal(rest->line, 23);
    tg__config_close(config);
}

static void
what_is_not_written_has_its_default(void **unused)
{
    (void)unused;
    tg_config *config = parsed(POLICY);
    assert_null(config->store);
    assert_string_equal(config->space, "default");
    assert_int_equal(config->trusted_proxy_count, 0);
    assert_null(config->client_header);
    assert_null(config->user_header);
    assert_int_equal(config->policies[0].on_store_failure, TG_FAIL_OPEN);
    assert_int_equal(config->policies[0].on_full, TG_FULL_OVERFLOW);
    assert_int_equal(config->policies[0].missing_identity, TG_MISSING_REJECT_401);
    tg__config_close(config);
    config = parsed("policies: []\ntrusted_proxies: []\n");
    assert_int_equal(config->policy_count, 0);
    tg__config_close(config);
}

static void
each_error_names_its_line_and_column(void **unused)
{
    (void)unused;
    static const struct {
        const char *yaml;
        unsigned line, column;
        const char *message;
    } cases[] = {
        /* the file */
        { "", 1, 1, "found nothing, expected a mapping with \"policies\"" },
        { "# nothing but this\n", 1, 1, "found nothing" },
        { "[]", 1, 1, "found a list, expected the rules file: a mapping of keys to values" },
        { "5/minute\n", 1, 1, "found \"5/minute\", expected the rules file" },
        { "store: shared://a\n", 1, 1, "found no \"policies\", expected a list of them" },
        { "policies:\n", 1, 1, "found nothing behind \"policies:\", expected a value or no key" },
        { "policies: {a: b}\n", 1, 11, "found a mapping, expected a list of policies" },
        { "polices: []\n", 1, 1, "found the unknown key \"polices\" in the rules file: did you mean \"policies\"?" },
        { "policies: []\nxyz: 1\n", 2, 1, "found the unknown key \"xyz\" in the rules file, expected include, store, namespace, " },
        { "policies: []\nplans: {}\n", 2, 1, "found \"plans\" in the rules file, which is not available yet" },
        { "policies: []\ninclude: /no/such.yaml\n", 2, 10, "/no/such.yaml: the rules file cannot be opened" },
        { "policies: []\ninclude: []\n", 2, 10, "found an empty list, expected a file" },
        { "store: \"shared://${TG_NO_SUCH}\"\npolicies: []\n", 1, 18, "found ${TG_NO_SUCH}, which is not set" },
        { "store: shared://${\npolicies: []\n", 1, 17, "found \"${\" without a variable's name" },
        { "policies: []\npause_when: {}\n", 2, 1, "not available yet" },
        { "policies: []\nlog_decisions: x\n", 2, 1, "unknown key \"log_decisions\" in the rules file" },
        { "policies: []\ndefaults: {log_decisions: some}\n", 2, 27, "found \"some\", expected none, refused or all" },
        { "policies: []\ndefaults: {log_decisions: {sample: 5}}\n", 2, 27, "found no \"what\" in log_decisions" },
        { "policies: []\ndefaults: {log_decisions: {what: all, sample: 0}}\n", 2, 47, "expected a whole number from 1 to" },
        { POLICY "    count: {status: [401, 4x]}\n", 4, 27, "found \"4x\", expected a status from 100 to 599, or 1xx to 5xx" },
        { POLICY "    count: {status: 600}\n", 4, 21, "expected a status from 100" },
        { POLICY "    count: {}\n", 4, 12, "found no \"status\" in count" },
        { POLICY "    count: 401\n", 4, 12, "found \"401\", expected count: a mapping of keys to values" },
        { POLICY "    cost: {response_header: X, default: 1, max: 5}\n", 4, 41, "found \"default\", expected \"reserve\"" },
        { POLICY "    cost: {header: X, reserve: 1, max: 5}\n", 4, 32, "found \"reserve\", expected \"default\"" },
        { "store: a\nnamespace: b\nstore: c\npolicies: []\n", 3, 1, "\"store\" a second time in the rules file: it already "
                                                                  "stands in line 1" },
        { "policies: []\nstore: []\n", 2, 8, "found a list, expected a store (\"shared://shop\")" },
        { "policies: []\nstore: \"\"\n", 2, 8, "found an empty text, expected a store" },
        { "policies: []\nstore: ~\n", 2, 1, "found nothing behind \"store:\"" },
        { "policies: []\nstore: \"a\\0b\"\n", 2, 8, "found a NUL byte, expected a store" },
        { "policies: []\nnamespace: a/b\n", 2, 12, "found \"a/b\", expected a namespace: 1 to 64 of the characters" },
        { "policies: []\ntrusted_proxies: [10.0.0.0/8, 10.0.0.1/8]\n", 2, 31, "\"10.0.0.1/8\" has bits set past its prefix" },
        { "policies: []\ntrusted_proxies: unix\n", 2, 18, "\"unix\" is no network: expected" },
        { "policies: []\ntrusted_proxies:\n  - ::1\n  - {a: b}\n", 4, 5, "found a mapping, expected a network" },
        { "policies: []\nclient_header: X-Forwaded-For\n", 2, 16, "did you mean X-Forwarded-For?" },
        { "policies: []\nuser_header: \"X User\"\n", 2, 14, "user_header \"X User\" is no header name" },
        { "policies: []\ndefaults: {on_full: full}\n", 2, 21, "found \"full\", expected overflow, open or closed" },
        { "policies: []\ndefaults: {headers: []}\n", 2, 21, "found an empty list, expected x-ratelimit, ietf, shadow or none" },
        { "policies: []\ndefaults: {headers: [x-ratelimit, none]}\n", 2, 35, "found \"none\" in a list, expected it alone" },
        { "policies: []\ndefaults: {headers: itef}\n", 2, 21, "found \"itef\", expected x-ratelimit, ietf or shadow: did you mean \"ietf\"?" },
        { "policies: []\ndefaults: {body: html}\n", 2, 18, "found \"html\", expected plain or problem" },
        { "policies: []\ndefaults: {reset_format: unix}\n", 2, 26, "found \"unix\", expected delta or epoch" },
        { "policies: []\ndefaults: {texts: {denid: a}}\n", 2, 20, "found the unknown key \"denid\" in texts: did you mean \"denied\"?" },
        { "policies: []\ndefaults: {texts: {denied: \"\"}}\n", 2, 28, "found an empty text, expected a text" },
        { "policies: []\ndefaults: {statuses: {denied: 200}}\n", 2, 31, "found \"200\", expected a whole number from 400 to 599" },
        { "policies: []\ndefaults: {statuses: {denied: many}}\n", 2, 31, "found \"many\", expected a whole number from 400" },
        { "policies: []\ndefaults: {on_ful: open}\n", 2, 12, "in defaults: did you mean \"on_full\"?" },
        /* YAML */
        { "policies: [\n", 2, 1, "not YAML: while parsing a flow node that begins in line 2" },
        { "policies: []\nstore: 'a\n\n", 4, 1, "not YAML: while scanning a quoted scalar that begins in line 2" },
        { "a: b: c\n", 1, 5, "not YAML: mapping values are not allowed in this context" },
        { "policies:\n\t- name: a\n", 2, 1, "found a tab: YAML is indented with spaces" },
        { "policies: []\nstore: \x01\n", 2, 8, "found bytes that no YAML text holds" },
        { "policies: []\nstore: \xff\n", 2, 8, "found bytes that no YAML text holds" },
        { "policies:\n  - &x\n    name: a\n", 2, 5, "found an anchor \"&x\": anchors and aliases are not read" },
        { "policies: []\nstore: &s x\n", 2, 8, "found an anchor \"&s\"" },
        { "policies: *x\n", 1, 11, "found an alias \"*x\"" },
        { "policies: []\nstore: !!str x\n", 2, 8, "found a tag \"tag:yaml.org,2002:str\"" },
        { "policies: !x []\n", 1, 11, "found a tag \"!x\"" },
        { "policies: []\n<<: {a: b}\n", 2, 1, "found a merge key \"<<\"" },
        { "policies: []\n---\npolicies: []\n", 2, 1, "found a second document" },
        { "%TAG !e! tag:example,2000:\n---\npolicies: []\n", 1, 1, "found a %TAG directive" },
        { "policies: []\n? [a]\n: b\n", 2, 3, "found a list as a key, expected a word" },
        { "policies: [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]\n", 1, 26, "found more than 16 levels" },
        /* bytes, not characters, also behind other letters and line ends of two bytes */
        { "# \xc3\xa9\xf0\x9f\x8c\x8a\npolicies: []\nstore: {\"\xc3\xa9\": 1, \xc3\xa9: ! x}\n", 3, 22, "found a tag" },
        { "policies: []\r\nplans: {}\r\n", 2, 1, "not available yet" },
        /* policies */
        { "policies: [{}]\n", 1, 12, "found a policy without \"name\"" },
        { "policies: [a]\n", 1, 12, "found \"a\", expected a policy: a mapping of keys to values" },
        { "policies:\n  - name: a\n", 2, 5, "found policy \"a\" without \"rules\"" },
        { "policies:\n  - name: a b\n    rules: 5/minute\n", 2, 11, "found \"a b\", expected a policy's name" },
        { "policies:\n  - name: 12345678901234567890123456789012345678901234567890123456789012345\n    rules: deny\n", 2, 11,
          "1 to 64 of the characters" },
        { POLICY "  - name: a\n    rules: 6/minute\n", 4, 5, "found a second policy \"a\": the first begins in line 2" },
        { POLICY "    mode: shadows\n", 4, 11, "found \"shadows\", expected enforce, shadow or challenge: did you mean \"shadow\"?" },
        { POLICY "    pause_when: latency > 5\n", 4, 17, "found `latency`, expected `error_rate`" },
        { POLICY "    pause_when: error_rate = 5%\n", 4, 28, "found `=`, expected `>`" },
        { POLICY "    pause_when: error_rate > 100%\n", 4, 30, "found `100%`, expected a whole number from 0 to 99" },
        { POLICY "    pause_when: error_rate > 5\n", 4, 31, "found the end, expected `%`" },
        { POLICY "    pause_when: error_rate > 5% for 1m\n", 4, 33, "found `for`, expected `over` with a duration or `min`" },
        { POLICY "    pause_when: error_rate > 5% over 1m over 2m\n", 4, 41, "found `over`, expected" },
        { POLICY "    pause_when: error_rate > 5% over 1day\n", 4, 38, "found `1day`, expected from 10 seconds to an hour" },
        { POLICY "    pause_when: error_rate > 5% over 1minuet\n", 4, 39, "did you mean `minute`?" },
        { POLICY "    pause_when: error_rate > 5% min 0\n", 4, 37, "found `0`, expected from 1 to 100000 answers" },
        { POLICY "    pause_when: [none]\n", 4, 17, "found a list, expected error_rate > 50%, or none" },
        { POLICY "    exempt: [10.0.0.1/8]\n", 4, 14, "\"10.0.0.1/8\" has bits set past its prefix" },
        { POLICY "    exempt: [10.0.0.1, friends]\n", 4, 24, "found \"friends\", expected a network (\"10.0.0.0/8\"), \"user:NAME\" or" },
        { POLICY "    deny: \"user:\"\n", 4, 11, "expected a user's name behind it" },
        { POLICY "    deny: \"header:X-Api-Key\"\n", 4, 11, "expected \"header:X-Api-Key=VALUE\"" },
        { "policies: []\nexempt: {a: b}\n", 2, 9, "found a mapping, expected a network" },
        { POLICY "    cost: much\n", 4, 11, "found \"much\", expected a whole number from 0 to 10000000000" },
        { POLICY "    cost: {header: X, query: y, max: 5}\n", 4, 11, "found several of \"header\", \"query\"" },
        { POLICY "    cost: {max: 5}\n", 4, 11, "found none of \"header\", \"query\"" },
        { POLICY "    cost: {header: X-Cost}\n", 4, 11, "found no \"max\", expected what one request costs at most" },
        { POLICY "    cost: {header: X-Cost, max: 5, min: 6}\n", 4, 41, "from 0 to 5" },
        { POLICY "    cost: {header: \"X Y\", max: 5}\n", 4, 20, "expected a header's name" },
        { POLICY "    plans: {}\n", 4, 12, "found no plan" },
        { POLICY "    plans: {free: 1/minuet}\n", 4, 21, "did you mean `minute`" },
        { POLICY "    plans: {default: free, free: 1/minute}\n", 4, 22, "found \"default\" beside \"rules\"" },
        { "policies:\n  - name: a\n    plans: {free: 1/minute}\n", 3, 12, "found no \"default\"" },
        { "policies:\n  - name: a\n    plans: {default: pro, free: 1/minute}\n", 3, 22, "found no plan \"pro\"" },
        { "policies: []\nunmatched: {rules: 1/s, match: {path: /}}\n", 2, 32, "found \"match\" in \"unmatched\", which is for" },
        { "policies: []\nunmatched: {by: ip}\n", 2, 12, "found policy \"unmatched\" without \"rules\"" },
        { POLICY "    match: {path: \"/u/{id}x\"}\n", 4, 19, "expected \"{id}\" to stand for one whole segment" },
        { POLICY "    match: {path: \"/u/{id:int}\"}\n", 4, 19, "one whole segment" },
        { POLICY "    match: {path: \"/*/{id}/x\"}\n", 4, 19, "expected '*' at the end alone" },
        { POLICY "    match: {path: \"/u/{id}*\"}\n", 4, 19, "'*'" },
        { POLICY "    match: {header: a}\n", 4, 21, "found \"a\", expected headers and their values" },
        { POLICY "    match: {header: {X-A: 1, x_a: 2}}\n", 4, 30, "a second time" },
        { POLICY "    headers: []\n", 4, 14, "found an empty list" },
        { POLICY "    mtch: {}\n", 4, 5, "did you mean \"match\"?" },
        { POLICY "    rules: 6/minute\n", 4, 5, "found \"rules\" a second time in a policy" },
        { POLICY "    also: yes\n", 4, 11, "found \"yes\", expected true or false" },
        { POLICY "    also: \"true\"\n", 4, 11, "found \"true\", expected true or false" },
        { POLICY "    on_store_failure: close\n", 4, 23, "found \"close\", expected open, closed or local: did you mean "
                                                        "\"closed\"?" },
        { POLICY "    missing_identity: reject\n", 4, 23, "expected reject 401, reject 400 or shared" },
        { "policies:\n  - {name: a, rules: 5/minute, 50/day}\n", 2, 32, "found the unknown key \"50/day\" in a policy" },
        /* rules: at the wrong word where the text stands as written, else where it begins */
        { "policies:\n  - name: a\n    rules: 5/minuet\n", 3, 14, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: \"5/minute; 6/minuet\"\n", 3, 25, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: '5/minute; 6/minuet'\n", 3, 25, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: \"5/minute;\\x206/minuet\"\n", 3, 12, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: >\n      5/minute;\n      6/minuet\n", 3, 12, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: [5/minute, 6/minuet]\n", 3, 25, "did you mean `minute`?" },
        { "policies:\n  - name: a\n    rules: [5/minute, 6/minute]\n", 3, 12, "" },
        { "policies:\n  - name: a\n    rules: sixty\n", 3, 12, "" },
        { "policies:\n  - name: a\n    rules: 6O/min\n", 3, 12, "" },
        { "policies:\n  - name: a\n    rules: 10/fortnight\n", 3, 15, "" },
        { "policies:\n  - name: a\n    rules: -5\n", 3, 12, "" },
        { "policies:\n  - name: a\n    rules: 5\n", 3, 13, "" },
        { "policies:\n  - name: a\n    rules: 0/minute\n", 3, 12, "deny" },
        { "policies:\n  - name: a\n    rules: {limit: 5}\n", 3, 12, "found a mapping, expected rules" },
        { "policies:\n  - name: a\n    rules: []\n", 3, 12, "found an empty list, expected rules" },
        { "policies:\n  - name: a\n    rules: \"\"\n", 3, 12, "found an empty text, expected rules" },
        { "policies:\n  - name: a\n    rules:\n", 3, 5, "found nothing behind \"rules:\"" },
        { "policies:\n  - name: a\n    rules: \"5/minute\\0\"\n", 3, 12, "" },
        { "policies:\n  - name: a\n    rules: 1/s; 2/m; 3/h; 4/d; 5/w\n    by: [ip, user, path, host, method, route, \"header:A\"]\n",
          2, 5, "has 5 rules for each of 7 dimensions, expected at most 32 pairs" },
        /* by */
        { POLICY "    by: [ip, user|adress]\n", 4, 19, "by: unknown kind \"adress\": expected one of ip, user, route" },
        { POLICY "    by: [ip, user|methd]\n", 4, 19, "by: unknown kind \"methd\": did you mean \"method\"?" },
        { POLICY "    by: headr:X-Api-Key\n", 4, 9, "by: unknown kind \"headr:X-Api-Key\": did you mean \"header:NAME\"?" },
        { POLICY "    by: cookie\n", 4, 9, "by: unknown kind \"cookie\": did you mean \"cookie:NAME\"?" },
        { POLICY "    by: \"user|cookie:\"\n", 4, 15, "by: \"cookie:\": expected a name behind" },
        { POLICY "    by: []\n", 4, 9, "found an empty list, expected what to count by" },
        { POLICY "    by: [ip, [user]]\n", 4, 14, "found a list, expected what to count by" },
        { POLICY "    by: [ip, ip]\n", 4, 14, "found \"ip\" a second time" },
        { POLICY "    by: [a, b, c, d, e, f, g, h, i]\n", 4, 9, "found 9 entries, expected at most 8" },
        /* match */
        { POLICY "    match: /login\n", 4, 12, "found \"/login\", expected match: a mapping of keys to values" },
        { POLICY "    match: {}\n", 4, 12, "found an empty match" },
        { POLICY "    match: {method: GET}\n", 4, 13, "found the unknown key \"method\" in match: did you mean \"methods\"?" },
        { POLICY "    match: {paths: /a}\n", 4, 13, "did you mean \"path\"?" },
        { POLICY "    match: {headers: a}\n", 4, 13, "did you mean \"header\"?" },
        { POLICY "    match: {query: a}\n", 4, 13, "not available yet" },
        { POLICY "    match: {path: login}\n", 4, 19, "found \"login\", expected a path that begins with '/'" },
        { POLICY "    match: {path: [/a, /b?c]}\n", 4, 24, "found \"/b?c\", expected a path alone" },
        { POLICY "    match: {path: */a}\n", 4, 20, "(a pattern that begins with * is quoted)" },
        { POLICY "    match: {path: *a}\n", 4, 19, "(a pattern that begins with * is quoted)" },
        { POLICY "    match: {methods: [GET, PSOT]}\n", 4, 28, "found the method \"PSOT\": did you mean POST?" },
        { POLICY "    match: {methods: []}\n", 4, 22, "found an empty list, expected a method" },
        { POLICY "    match: {methods: \"GET POST\"}\n", 4, 22, "found \"GET POST\", expected a method" },
        { POLICY "    match: {host: \"shop.example:80\"}\n", 4, 19, "expected a host without a port" },
        { POLICY "    match: {host: \"http://shop.example\"}\n", 4, 19, "expected a host's name" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tg_config *config = NULL;
        tg_error error = { 0 };
        char place[40];
        const tg_status status = tg__config_parse(tg_text_of(cases[i].yaml), "r.yaml", &config, &error);
        snprintf(place, sizeof place, "r.yaml:%u:%u: ", cases[i].line, cases[i].column);
        if (status != TG_E_CONFIG || error.line != cases[i].line || error.column != cases[i].column ||
            strncmp(error.message, place, strlen(place)) != 0 || !strstr(error.message, cases[i].message))
            fail_msg("case %zu: %s %s\nexpected %s%s\n%s", i + 1, tg_status_name(status), error.message, place,
                     cases[i].message, cases[i].yaml);
        assert_int_equal(tg__config_parse(tg_text_of(cases[i].yaml), "r.yaml", &config, NULL), TG_E_CONFIG);
    }
}

static void
policies_marked_also_must_fit_into_one_decision(void **unused)
{
    (void)unused;
    char yaml[8000], *at = stpcpy(yaml, "policies:\n");
    for (int i = 0; i < 6; i++)
        at += sprintf(at, "  - {name: also%d, rules: %d/minute, also: true}\n", i, i + 1);
    char *others = at;
    at = stpcpy(at, "  - {name: a, rules: 1/minute}\n  - {name: b, rules: 1/minute}\n");
    tg_config *config = parsed(yaml); /* 6, and the first match of each of two readings of a path: 8 */
    tg__config_close(config);
    tg_error error;
    strcpy(at, "  - {name: also6, rules: 1/minute, also: true}\n");
    assert_int_equal(tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "r.yaml:2:3: found 7 policies marked \"also\", expected at most 6"));
    strcpy(others, "  - {name: a, rules: 1/minute}\n  - {name: also6, rules: 1/minute, also: true}\n");
    config = parsed(yaml);
    tg__config_close(config);
    strcpy(others, "  - name: many\n    rules: 1/s; 2/m; 3/h\n    by: [ip, user, path, host, method, route, ip+path, ip+user]\n"
                   "  - {name: one, rules: 1/s, by: route|ip, also: true}\n");
    assert_int_equal(tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error), TG_E_CONFIG);
    static const char dimensions[] = "policies:\n"
                                     "  - {name: a, rules: 1/s, by: [ip, user, path, host], also: true}\n"
                                     "  - {name: b, rules: 1/s, by: [ip, route, method, ip+user, ip+path]}\n";
    assert_int_equal(tg__config_parse(tg_text_of(dimensions), "r.yaml", &config, NULL), TG_OK); /* ip is one */
    tg__config_close(config);
    static const char too_many[] = "policies:\n"
                                   "  - {name: a, rules: 1/s, by: [ip, user, path, host], also: true}\n"
                                   "  - {name: b, rules: 1/s, by: [user|ip, route, method, ip+user, ip+path]}\n";
    assert_int_equal(tg__config_parse(tg_text_of(too_many), "r.yaml", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "may meet 9 dimensions"));
    assert_int_equal(tg__config_parse(tg_text_of("policies:\n"
                                                 "  - name: a\n    rules: 1/s; 2/m; 3/h; 4/d\n    also: true\n"
                                                 "    by: [ip, user, path, host]\n"
                                                 "  - name: b\n    rules: 1/s; 2/m; 3/h; 4/d; 5/w\n"
                                                 "    by: [ip, user, path, host]\n"),
                                      "r.yaml", &config, &error),
                     TG_E_CONFIG);
    assert_non_null(strstr(error.message, "may meet 36 pairs"));
    /* Two first matches where a path can be read two ways, but only where a path decides. */
    static const char readings[] = "policies:\n"
                                   "  - {name: a, match: {%s}, rules: 1/s, by: [ip, user, path, host, method]}\n"
                                   "  - {name: b, match: {%s}, rules: 1/s, by: [route, ip+path, ip+user, ip+host]}\n";
    snprintf(yaml, sizeof yaml, readings, "path: /a", "methods: GET");
    assert_int_equal(tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "may meet 9 dimensions, with \"a\", \"b\" and the policies"));
    snprintf(yaml, sizeof yaml, readings, "host: a.example", "methods: GET");
    config = parsed(yaml);
    tg__config_close(config);
}

static void
a_file_of_the_largest_size_is_read_in_time_whatever_stands_in_it(void **unused)
{
    (void)unused;
    /* Each filler repeated up to a megabyte: what counts is that none of them makes the reading quadratic. The limit
     * is far above what a linear reading takes under sanitizers, and far below what a quadratic one would. */
    static const char *const fillers[] = { "a: b\n", "- a\n", "[", "{", "[a,", "{a: ", "\"", "'", "\xc3\xa9", "? ", "- - ",
                                           "&a ", "*a ", "!a ", "#\n", "\n", " ", "a", "a\n ", "|\n", "%", "---\n", ": ",
                                           "a: &a\n", "\"\\x41", "- {name: a, rules: 1/s}\n", "a:\n  b" };
    char *yaml = malloc(TG_CONFIG_BYTES_MAX + 2);
    assert_non_null(yaml);
    for (int in_list = 0; in_list < 2; in_list++) {
        for (size_t i = 0; i < COUNT(fillers); i++) {
            const size_t length = strlen(fillers[i]);
            size_t used = in_list ? (size_t)(stpcpy(yaml, "policies:\n") - yaml) : 0;
            while (used + length <= TG_CONFIG_BYTES_MAX) {
                memcpy(yaml + used, fillers[i], length);
                used += length;
            }
            tg_config *config;
            const clock_t begun = clock();
            assert_int_equal(tg__config_parse((tg_text){ yaml, used }, "r.yaml", &config, NULL), TG_E_CONFIG);
            const double seconds = (double)(clock() - begun) / CLOCKS_PER_SEC;
            if (seconds > 20)
                fail_msg("\"%s\" took %.1f s", fillers[i], seconds);
        }
    }
    memset(yaml, ' ', TG_CONFIG_BYTES_MAX + 1);
    tg_config *config;
    tg_error error;
    assert_int_equal(tg__config_parse((tg_text){ yaml, TG_CONFIG_BYTES_MAX + 1 }, "r.yaml", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "found 1048577 bytes, expected at most 1048576"));
    free(yaml);
}

static void
as_many_policies_as_allowed_are_read_and_no_more(void **unused)
{
    (void)unused;
    const size_t room = 64 * (TG_POLICIES_MAX + 2);
    char *yaml = malloc(room), *at = stpcpy(yaml, "policies:\n");
    for (int i = 0; i < TG_POLICIES_MAX; i++)
        at += sprintf(at, "  - {name: p%d, rules: 1/s}\n", i);
    tg_config *config = parsed(yaml);
    assert_int_equal(config->policy_count, TG_POLICIES_MAX);
    tg__config_close(config);
    strcpy(at, "  - {name: one_more, rules: 1/s}\n");
    tg_error error;
    assert_int_equal(tg__config_parse(tg_text_of(yaml), "r.yaml", &config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "found 1025 policies, expected at most 1024"));
    free(yaml);
}

static void
of_a_long_path_the_end_is_shown(void **unused)
{
    (void)unused;
    char path[600];
    memset(path, 'd', sizeof path);
    strcpy(path + sizeof path - 12, "/rules.yaml");
    tg_config *config;
    tg_error error;
    assert_int_equal(tg__config_parse(tg_text_of("policies: 5\n"), path, &config, &error), TG_E_CONFIG);
    assert_memory_equal(error.message, "...ddd", 6);
    assert_non_null(strstr(error.message, "/rules.yaml:1:11: found \"5\", expected a list of policies"));
}

static void
the_example_of_the_documentation_is_read(void **unused)
{
    (void)unused;
    static char page[20000];
    FILE *file = fopen("docs/rules-file.md", "r"); /* tests run in the root of the sources */
    assert_non_null(file);
    page[fread(page, 1, sizeof page - 1, file)] = '\0';
    fclose(file);
    char *begin = strstr(page, "```yaml\n"), *end = begin ? strstr(begin + 8, "```") : NULL;
    assert_non_null(end);
    *end = '\0';
    tg_config *config = parsed(begin + 8);
    assert_int_equal(config->policy_count, 4);
    tg__config_close(config);
}

/* ---- files ---- */

static tg_status
read_file(const char *path, tg_error *error)
{
    tg_config *config = NULL;
    const tg_status status = tg__config_read(path, &config, error);
    tg__config_close(config);
    return status;
}

static void
a_file_that_cannot_be_read_is_named(void **unused)
{
    (void)unused;
    char folder[] = "/tmp/tidegate-test-XXXXXX", path[64];
    tg_error error;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/none.yaml", folder);
    assert_int_equal(read_file(path, &error), TG_E_CONFIG);
    assert_int_equal(error.system_error, ENOENT);
    assert_non_null(strstr(error.message, path));
    assert_int_equal(read_file(folder, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "found no regular file"));
    snprintf(path, sizeof path, "%s/fifo", folder);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(read_file(path, &error), TG_E_CONFIG); /* and does not wait for a writer */
    unlink(path);

    snprintf(path, sizeof path, "%s/rules.yaml", folder);
    const int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    assert_true(fd != -1);
    assert_int_equal(write(fd, POLICY, strlen(POLICY)), strlen(POLICY));
    assert_int_equal(read_file(path, &error), TG_OK);
    assert_int_equal(ftruncate(fd, TG_CONFIG_BYTES_MAX + 1), 0);
    assert_int_equal(read_file(path, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "found more than 1048576 bytes"));
    close(fd);
    unlink(path);
    rmdir(folder);
}

static char include_folder[64];

static void
put_file(const char *name, const char *yaml)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", include_folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(yaml, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static tg_status
read_main(tg_config **config, tg_error *error)
{
    char path[128];
    snprintf(path, sizeof path, "%s/main.yaml", include_folder);
    return tg__config_read(path, config, error);
}

static void
an_environments_file_includes_what_all_share_and_has_the_last_word(void **unused)
{
    (void)unused;
    tg_config *config;
    tg_error error;
    strcpy(include_folder, "/tmp/tidegate-include-XXXXXX");
    assert_non_null(mkdtemp(include_folder));
    setenv("TG_TEST_SHOP", "shop-7", 1);
    put_file("main.yaml", "include: base.yaml\nstore: \"shared://${TG_TEST_SHOP}?size=1MiB\"\n"
                          "defaults: {body: problem}\n"
                          "policies: [{name: mine, match: {path: /a}, rules: 1/s}]\n");
    put_file("base.yaml", "include: [more.yaml]\nstore: shared://base\nnamespace: shop\n"
                          "policies: [{name: theirs, rules: 2/s}]\nunmatched: {rules: 3/s}\n");
    put_file("more.yaml", "namespace: more\ndefaults: {on_store_failure: closed}\npolicies: [{name: last, rules: 4/s, "
                          "also: true}]\n");
    if (read_main(&config, &error) != TG_OK)
        fail_msg("%s", error.message);
    static const char *const names[] = { "mine", "theirs", "last", "unmatched" };
    assert_string_equal(config->store, "shared://shop-7?size=1MiB");
    assert_string_equal(config->space, "shop");
    assert_int_equal(config->policy_count, COUNT(names));
    for (size_t i = 0; i < COUNT(names); i++) {
        assert_string_equal(config->policies[i].name, names[i]);
        assert_true(config->policies[i].style.problem); /* inherited by what is included */
    }
    assert_int_equal(config->policies[1].on_store_failure, TG_FAIL_OPEN);
    assert_int_equal(config->policies[2].on_store_failure, TG_FAIL_CLOSED);
    assert_int_equal(config->file_count, 3);
    assert_non_null(strstr(config->policies[2].file, "/more.yaml"));
    tg__config_close(config);

    put_file("more.yaml", "policies:\n  - {name: last, rules: 4/fortnight}\n");
    assert_int_equal(read_main(&config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "/more.yaml:2:"));
    assert_int_equal(error.line, 2);
    put_file("more.yaml", "policies: [{name: mine, rules: 4/s}]\n");
    assert_int_equal(read_main(&config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "found a second policy \"mine\""));
    put_file("more.yaml", "include: more.yaml\npolicies: []\n");
    assert_int_equal(read_main(&config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "does a file include itself?"));
    unsetenv("TG_TEST_SHOP");
    assert_int_equal(read_main(&config, &error), TG_E_CONFIG);
    assert_non_null(strstr(error.message, "/main.yaml:2:18: found ${TG_TEST_SHOP}, which is not set"));
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", include_folder);
    assert_int_equal(system(command), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_file_is_read_as_written),
        cmocka_unit_test(what_is_not_written_has_its_default),
        cmocka_unit_test(each_error_names_its_line_and_column),
        cmocka_unit_test(policies_marked_also_must_fit_into_one_decision),
        cmocka_unit_test(a_file_of_the_largest_size_is_read_in_time_whatever_stands_in_it),
        cmocka_unit_test(as_many_policies_as_allowed_are_read_and_no_more),
        cmocka_unit_test(of_a_long_path_the_end_is_shown),
        cmocka_unit_test(the_example_of_the_documentation_is_read),
        cmocka_unit_test(a_file_that_cannot_be_read_is_named),
        cmocka_unit_test(an_environments_file_includes_what_all_share_and_has_the_last_word),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
