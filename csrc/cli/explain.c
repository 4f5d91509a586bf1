/* tidegate explain: why a request is answered as it is. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { HEADERS_MAX = 128 };

static const char usage[] =
    "usage: tidegate explain --request 'METHOD PATH' [option]...\n"
    "\n"
    "Says which policies of the rules file a request meets and which not and why, who is counted, what each rule has left\n"
    "now, the decision and the header fields. Reads the counts of the running site; takes nothing and makes nothing.\n"
    "\n"
    "  --request 'METHOD PATH'  or PATH alone: GET\n"
    "  --config FILE            the rules file (else TIDEGATE_CONFIG)\n"
    "  --ip ADDRESS             the peer's address (127.0.0.1); \"unix:\" for a local socket\n"
    "  --header 'NAME: VALUE'   repeatable\n"
    "  --host NAME              else the Host header\n"
    "  --user NAME              as the face would know it\n"
    "  --route TEMPLATE         the route's template, /users/{id}\n"
    "  --cost N                 units that the request takes (1)\n"
    "  --store URI              else TIDEGATE_STORE, the file's store, shared://default\n"
    "  --json                   one JSON object\n"
    "\n"
    "Exit status: 0 explained, whatever the decision; 1 something failed; 2 wrong usage.\n";

typedef struct headers {
    tg_header list[HEADERS_MAX];
    size_t count;
    tg_text host;
} headers;

static tg_text
trimmed(const char *from, const char *to)
{
    while (from < to && (*from == ' ' || *from == '\t'))
        from++;
    while (to > from && (to[-1] == ' ' || to[-1] == '\t'))
        to--;
    return (tg_text){ from, (size_t)(to - from) };
}

static bool
add_header(const char *line, void *context)
{
    headers *into = context;
    const char *colon = strchr(line, ':');
    if (!colon || colon == line) {
        cli_misused("explain", "--header %.80s: expected 'NAME: VALUE'", line);
        return false;
    }
    if (into->count == HEADERS_MAX) {
        cli_misused("explain", "--header: at most %d", HEADERS_MAX);
        return false;
    }
    tg_header *header = &into->list[into->count++];
    header->name = trimmed(line, colon);
    header->value = trimmed(colon + 1, line + strlen(line));
    if (header->name.length == 4 && strncasecmp(header->name.data, "host", 4) == 0)
        into->host = header->value;
    return true;
}

static bool
read_request(const char *text, tg_request *request)
{
    const char *space = strchr(text, ' ');
    const tg_text method = space ? (tg_text){ text, (size_t)(space - text) } : tg_text_of("GET");
    const char *path = space ? space + strspn(space, " ") : text;
    request->method = method;
    request->path = tg_text_of(path);
    const char *end = strchr(path, ' '); /* "GET /x HTTP/1.1" as a log has it */
    if (end)
        request->path.length = (size_t)(end - path);
    return method.length > 0 && request->path.length > 0;
}

int
cli_explain(int count, char **arguments)
{
    const char *asked = NULL, *config = NULL, *ip = "127.0.0.1", *host = NULL, *user = NULL, *route = NULL, *cost_text = "1",
               *store = NULL;
    bool as_json = false;
    headers sent = { .count = 0 };
    const cli_option options[] = {
        { .name = "--request", .value = &asked },
        { .name = "--config", .value = &config },
        { .name = "--ip", .value = &ip },
        { .name = "--header", .each = add_header, .context = &sent },
        { .name = "--host", .value = &host },
        { .name = "--user", .value = &user },
        { .name = "--route", .value = &route },
        { .name = "--cost", .value = &cost_text },
        { .name = "--store", .value = &store },
        { .name = "--json", .flag = &as_json },
        { 0 },
    };
    count = cli_options(count, arguments, options, usage);
    if (count < 0)
        return CLI_USAGE;
    if (count > 1)
        return cli_misused("explain", "%.80s: no such argument", arguments[1]);
    tg_request request = {
        .peer = tg_text_of(ip),
        .user = tg_text_of(user),
        .route = tg_text_of(route),
        .host = host ? tg_text_of(host) : sent.host,
        .headers = sent.list,
        .header_count = sent.count,
    };
    if (!asked || !read_request(asked, &request))
        return cli_misused("explain", "--request is missing: expected 'POST /login'");
    if (*request.path.data != '/' && *request.path.data != '*' && !strstr(asked, "://")) /* forms of RFC 9112, 3.2 */
        return cli_misused("explain", "--request '%.80s': expected a path that begins with '/', as in 'POST /login'", asked);
    char *end;
    const unsigned long long cost = strtoull(cost_text, &end, 10);
    if (*cost_text < '0' || *cost_text > '9' || *end || cost > TG_LIMIT_MAX)
        return cli_misused("explain", "--cost %.40s: expected a number from 0 to 10000000000", cost_text);

    const char *named = getenv("TIDEGATE_CONFIG");
    if (!config && !(named && named[0]))
        return cli_fail("no rules file: name it with --config or TIDEGATE_CONFIG; limits that are written in code are in none, and "
                        "are asked about in Python, by a Limiter of the same rules and name: limiter.peek()");
    const tg_gate_options gate_options = { .path = tg_text_of(config), .store = tg_text_of(store), .look = true };
    tg_gate *gate;
    tg_error error;
    tg_explanation *explanation;
    bool degraded = false;
    if (tg_gate_open(&gate_options, &gate, &error) != TG_OK)
        return cli_fail("%s", error.message);
    /* What the library would log about this request is in the explanation: its notices are left where they are, but for why
     * the store does not answer, which the explanation has no place for. */
    const tg_status status = tg_gate_explain(gate, &request, cost, &explanation, &error);
    if (status == TG_OK) {
        if (!as_json)
            printf("request   %.*s %.*s\n", (int)request.method.length, request.method.data, (int)request.path.length,
                   request.path.data);
        tg_explanation_write(explanation, as_json, cli_put, stdout);
        degraded = explanation->judgement.decision.degraded;
        tg_explanation_close(explanation);
    }
    tg_notice notice;
    while (degraded && tg_notice_pending() && tg_notice_take(&notice))
        if (strcmp(notice.code, "store-failing") == 0)
            fprintf(stderr, "tidegate: %s: %s\n", notice.code, notice.message);
    tg_gate_close(gate);
    return status == TG_OK ? CLI_FINE : cli_fail("%s", error.message);
}
