/* Why a request gets the answer it gets: the same judging, with nothing taken, and what led to it put into words.
 * Must not enter: a second way to judge. */
#include "core/core.h"

#include "base/json.h"
#include "config/config.h"
#include "core/criteria.h"
#include "core/watch.h"
#include "identity/client.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ATTEMPTS = 8 }; /* a reload between the two looks makes us look again */

/* ---- which policies, and why ---- */

static void __attribute__((format(printf, 3, 4)))
append(char *text, size_t size, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

static const char *
show_subject(const tg_criterion *criterion, const tg_request *request, char *buffer, size_t size)
{
    const tg_match *only = &criterion->only;
    const tg_text text = only->path_count     ? request->path
                         : only->method_count ? request->method
                         : only->host_count   ? request->host
                                              : request->route;
    return tg__text_show(text, buffer, size);
}

static void
say_criterion(const tg_criterion *criterion, const tg_request *request, bool met, char *why, size_t size)
{
    char subject[80], one[80];
    const size_t count = tg__criterion_count(criterion);
    if (why[0])
        append(why, size, ", ");
    show_subject(criterion, request, subject, sizeof subject);
    if (criterion->only.header_count) /* its value may be a secret: only what is wanted is told */
        append(why, size, "header %s is %s", criterion->only.headers[0].name.text, met ? "one of" : "none of");
    else if (subject[0])
        append(why, size, "%s \"%s\" is %s", criterion->word, subject, met ? "one of" : "none of");
    else
        append(why, size, "no %s is known, wanted is", criterion->word);
    for (size_t i = 0; i < count && i < 4; i++) {
        tg__criterion_text(criterion, i, one, sizeof one);
        append(why, size, "%s \"%s\"", i ? "," : "", one);
    }
    if (count > 4)
        append(why, size, " and %zu more", count - 4);
}

static void
say_why(const tg_held *held, const tg_request *request, const size_t *found, size_t found_count, size_t index,
        tg_explained_policy *said)
{
    const tg_config *config = held->config;
    const tg_policy *policy = &config->policies[index];
    tg_criterion criteria[TG_CRITERIA_MAX];
    const size_t count = tg__criteria_of(policy->match, criteria);
    memcpy(said->name, policy->name, sizeof said->name);
    said->line = policy->line;
    for (size_t i = 0; i < found_count; i++)
        said->applies |= found[i] == index;
    bool met = true;
    for (size_t i = 0; i < count; i++) {
        const bool one = tg__criterion_meets(&criteria[i], request);
        if (met && !one)
            said->why[0] = '\0'; /* what it lacks says more than what it has */
        if (met ? true : !one)
            say_criterion(&criteria[i], request, one, said->why, sizeof said->why);
        met &= one;
    }
    if (said->applies && policy->also)
        append(said->why, sizeof said->why, "%salso: beside whatever else matches", said->why[0] ? "; " : "");
    else if (said->applies && !policy->match)
        append(said->why, sizeof said->why, "no match: every request");
    if (said->applies && tg__roll_holds(&policy->deny, held->client, request))
        append(said->why, sizeof said->why, "; the client is in its deny list");
    if (said->applies && tg__roll_holds(&policy->exempt, held->client, request))
        append(said->why, sizeof said->why, "; the client is in its exempt list");
    tg_watched watched;
    if (said->applies && policy->pause.period_us && policy->mode == TG_MODE_ENFORCE && held->limiters[index] &&
        tg__watch_pauses(&held->watches[index], held->limiters[index], &policy->pause, &watched))
        append(said->why, sizeof said->why, "; it refuses nobody at the moment: %" PRIu64 " of %" PRIu64 " answers were errors",
               watched.errors, watched.answers);
    if (said->applies || !met)
        return;
    for (size_t i = 0; i < found_count; i++)
        if (found[i] < index && !config->policies[found[i]].also) {
            snprintf(said->why, sizeof said->why, "would match, but \"%s\" in line %u comes first; also: true would add it",
                     config->policies[found[i]].name, config->policies[found[i]].line);
            return;
        }
    append(said->why, sizeof said->why, "%sis not among the policies in force for it", said->why[0] ? "; " : "");
}

/* ---- who is asking ---- */

static void
explain_client(const tg_client *client, const tg_request *request, tg_explanation *made)
{
    char peer[TG_ADDRESS_TEXT_MAX];
    tg_error fault;
    tg_text line;
    if (!client)
        client = &tg__client_default;
    if (tg_client_resolve(client, request, made->client, &fault) != TG_OK) {
        made->client[0] = '\0';
        snprintf(made->client_why, sizeof made->client_why, "%.300s", fault.message);
        return;
    }
    const bool local = tg__peer_is_local(request->peer), trusted = tg__client_trusts(client, request->peer);
    tg_header_lines lines = tg__header_lines(request, &client->header);
    const bool sent = tg__header_previous(&lines, &line);
    if (local)
        strcpy(peer, "a local socket");
    else
        tg__text_show(request->peer, peer, sizeof peer);
    if (request->client_resolved)
        snprintf(made->client_why, sizeof made->client_why, "as the server in front resolved it");
    else if (trusted && sent)
        snprintf(made->client_why, sizeof made->client_why, "from %s: the peer, %s, is trusted", client->header.text, peer);
    else if (sent)
        snprintf(made->client_why, sizeof made->client_why,
                 "the peer itself: %s was sent and is ignored, since %s is not among trusted_proxies",
                 client->header.text, peer);
    else
        snprintf(made->client_why, sizeof made->client_why, "the peer itself: no %s was sent", client->header.text);
}

/* ---- the whole ---- */

typedef struct holder {
    tg_explanation explanation; /* first: an explanation of ours is its holder */
    tg_explained_policy policies[];
} holder;

/* Without what stands before '@': a password may. */
static void
show_uri(const char *uri, char *text, size_t size)
{
    const char *begin = strstr(uri, "://"), *at = begin ? strchr(begin + 3, '@') : NULL;
    if (at)
        snprintf(text, size, "%.*s***%s", (int)(begin + 3 - uri), uri, at);
    else
        snprintf(text, size, "%s", uri);
}

static tg_status
explain_held(tg_gate *gate, const tg_held *held, const tg_request *request, tg_explanation **made, tg_error *error)
{
    const tg_config *config = held->config;
    size_t found[TG_LIMITERS_MAX];
    holder *holds = calloc(1, sizeof *holds + config->policy_count * sizeof holds->policies[0]);
    if (!holds)
        return tg__error(error, TG_E_NOMEM, "explain: %zu policies", config->policy_count);
    tg_explanation *explanation = &holds->explanation;
    const size_t found_count = tg__config_match(config, request, found);
    for (size_t i = 0; i < config->policy_count; i++)
        say_why(held, request, found, found_count, i, &holds->policies[i]);
    explanation->policies = holds->policies;
    explanation->policy_count = config->policy_count;
    memcpy(explanation->applied, found, found_count * sizeof *found);
    explanation->applied_count = found_count;
    explain_client(held->client, request, explanation);
    tg_store *store = tg_gate_store(gate);
    show_uri(tg__gate_store_uri(gate), explanation->store, sizeof explanation->store);
    explanation->store_missing = tg_gate_stands_in(gate);
    explanation->now_us = tg_store_now_us(store);
    explanation->utc_offset_us = tg_store_utc_offset_us(store);
    *made = explanation;
    return TG_OK;
}

tg_status
tg_gate_explain(tg_gate *gate, const tg_request *request, uint64_t cost, tg_explanation **explanation, tg_error *error)
{
    tg_request peeked = *request;
    tg_explanation *made = NULL;
    tg_status status = TG_OK;
    peeked.peek = true;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        tg_explanation_close(made);
        made = NULL;
        const uint64_t generation = tg_gate_generation(gate);
        const tg_held held = tg__gate_hold(gate);
        status = explain_held(gate, &held, &peeked, &made, error);
        tg__gate_let_go(gate, &held);
        if (status == TG_OK)
            status = tg_gate_judge(gate, &peeked, cost, NULL, 0, &made->judgement, &made->answer, error);
        if (status != TG_OK || tg_gate_generation(gate) == generation)
            break;
    }
    if (status != TG_OK) {
        tg_explanation_close(made);
        return status;
    }
    made->generation = tg_gate_generation(gate);
    const tg_decision *decision = &made->judgement.decision;
    for (size_t i = 0; i < decision->identity_count; i++)
        tg__identity_show(&decision->identities[i], tg_gate_store(gate)->private_kinds, made->identities[i],
                          sizeof made->identities[i]);
    *explanation = made;
    return TG_OK;
}

void
tg_explanation_close(tg_explanation *explanation)
{
    free(explanation);
}

/* ---- in words ---- */

static const char *
outcome_word(const tg_explanation *explanation)
{
    switch (explanation->judgement.outcome) {
    case TG_UNMATCHED:
        if (explanation->judgement.policy[0]) /* over its limit, and let through all the same */
            return explanation->judgement.challenged ? "challenged" : "paused";
        return explanation->applied_count ? "free" : "unmatched"; /* a CORS preflight */
    case TG_ALLOWED:
        return "allowed";
    case TG_DENIED:
        return "denied";
    case TG_FORBIDDEN:
        return "forbidden";
    case TG_UNIDENTIFIED:
        return "unidentified";
    case TG_UNAVAILABLE:
        return "unavailable";
    case TG_EXEMPT:
        return "exempt";
    }
    return "?";
}

static const char *
policy_of(const tg_explanation *explanation, const tg_result *result)
{
    return result->limiter < explanation->applied_count
               ? explanation->policies[explanation->applied[result->limiter]].name
               : "?";
}

static void __attribute__((format(printf, 3, 4)))
say(tg_sink *sink, void *context, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length > 0)
        sink(context, (tg_text){ text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1 });
}

/* "12.5 s": milliseconds up, so that waiting as long as we say is enough. */
static const char *
seconds(uint64_t us, char text[32])
{
    const uint64_t ms = us / 1000 + (us % 1000 != 0);
    if (us == TG_NEVER)
        return "for ever";
    if (ms % 1000)
        snprintf(text, 32, "%" PRIu64 ".%03" PRIu64 " s", ms / 1000, ms % 1000);
    else
        snprintf(text, 32, "%" PRIu64 " s", ms / 1000);
    return text;
}

/* What the request would leave. A cost that passes takes so many places of cost 1 from every algorithm, and a request that
 * does not pass as a whole takes none. */
static uint64_t
remaining_after(const tg_explanation *explanation, const tg_result *result)
{
    const bool takes = explanation->judgement.decision.allowed && result->cost <= result->remaining;
    return result->remaining - (takes ? result->cost : 0);
}

static void
write_rule(const tg_explanation *explanation, const tg_result *result, tg_sink *sink, void *context)
{
    char rule[TG_RULE_TEXT_MAX], wait[32], reset[32], delay[32];
    tg_rule_text(&result->rule, rule);
    say(sink, context, "  %s: %s for %s\n    ", policy_of(explanation, result), rule,
        explanation->identities[result->identity]);
    if (result->rule.algorithm == TG_DENY) {
        say(sink, context, "refuses everything\n");
        return;
    }
    const uint64_t after = remaining_after(explanation, result);
    say(sink, context, "%" PRIu64 " of %" PRIu64 " left", result->remaining, result->rule.burst);
    if (after != result->remaining)
        say(sink, context, " before this request, %" PRIu64 " after it", after);
    if (!result->allowed && result->retry_after_us == TG_NEVER)
        say(sink, context, ", this cost never passes");
    else if (!result->allowed)
        say(sink, context, ", passes in %s", seconds(result->retry_after_us, wait));
    if (result->delay_us)
        say(sink, context, ", delayed by %s", seconds(result->delay_us, delay));
    if (result->reset_after_us)
        say(sink, context, ", as new in %s\n", seconds(result->reset_after_us, reset));
    else
        say(sink, context, ", nothing used\n");
}

static void
write_text(const tg_explanation *explanation, tg_sink *sink, void *context)
{
    const tg_judgement *judgement = &explanation->judgement;
    const tg_decision *decision = &judgement->decision;
    say(sink, context, "client    %s (%s)\n", explanation->client[0] ? explanation->client : "unknown",
        explanation->client_why);
    say(sink, context, "store     %s", explanation->store);
    if (explanation->store_missing) /* a name may be another table for the site's user: docs/tables.md */
        say(sink, context, " (no table there yet for user %lu: nothing has been counted)", (unsigned long)geteuid());
    say(sink, context, "\n");
    say(sink, context, "policies%s\n", explanation->policy_count ? "" : "  none in the file");
    for (size_t i = 0; i < explanation->policy_count; i++) {
        const tg_explained_policy *policy = &explanation->policies[i];
        say(sink, context, "  %s %s (line %u): %s\n", policy->applies ? "+" : "-", policy->name, policy->line, policy->why);
    }
    if (decision->result_count)
        say(sink, context, "rules\n");
    for (size_t i = 0; i < decision->result_count; i++)
        write_rule(explanation, &decision->results[i], sink, context);
    say(sink, context, "decision  %s%s%s%s", outcome_word(explanation), judgement->policy[0] ? " by \"" : "",
        judgement->policy, judgement->policy[0] ? "\"" : "");
    if (!judgement->policy[0] && (judgement->outcome == TG_EXEMPT || judgement->outcome == TG_FORBIDDEN))
        say(sink, context, " by the file's own list");
    if (judgement->outcome == TG_UNMATCHED && judgement->policy[0])
        say(sink, context, judgement->challenged ? ": over its limit, which it only marks"
                                                 : ": over its limit, and it refuses nobody at the moment");
    else if (judgement->outcome == TG_UNMATCHED)
        say(sink, context, explanation->applied_count ? ": a CORS preflight is never counted" : ": no policy speaks of it");
    if (judgement->missing[0])
        say(sink, context, ": \"%s\" is missing", judgement->missing);
    if (decision->degraded)
        say(sink, context, ": the store did not answer, so on_store_failure decides");
    say(sink, context, "\nanswer    ");
    if (explanation->answer.status)
        say(sink, context, "%d %s\n", explanation->answer.status, explanation->answer.reason);
    else
        say(sink, context, "the application's own%s\n",
            explanation->answer.field_count ? ", with (as before this request)" : "");
    for (size_t i = 0; i < explanation->answer.field_count; i++) {
        const tg_field *field = &explanation->answer.fields[i];
        say(sink, context, "  %.*s: %.*s\n", (int)field->name.length, field->name.data, (int)field->value.length,
            field->value.data);
    }
    if (explanation->answer.body.length)
        say(sink, context, "  %.*s\n", (int)explanation->answer.body.length, explanation->answer.body.data);
}

static void
write_json(const tg_explanation *explanation, tg_sink *sink, void *context)
{
    tg_json json = { .sink = sink, .context = context };
    const tg_judgement *judgement = &explanation->judgement;
    const tg_decision *decision = &judgement->decision;
    char rule[TG_RULE_TEXT_MAX];
    tg__json_open(&json, NULL, '{');
    tg__json_text(&json, "client", tg_text_of(explanation->client));
    tg__json_text(&json, "client_why", tg_text_of(explanation->client_why));
    tg__json_text(&json, "store", tg_text_of(explanation->store));
    tg__json_flag(&json, "store_missing", explanation->store_missing);
    tg__json_open(&json, "policies", '[');
    for (size_t i = 0; i < explanation->policy_count; i++) {
        const tg_explained_policy *policy = &explanation->policies[i];
        tg__json_open(&json, NULL, '{');
        tg__json_text(&json, "name", tg_text_of(policy->name));
        tg__json_number(&json, "line", policy->line);
        tg__json_flag(&json, "applies", policy->applies);
        tg__json_text(&json, "why", tg_text_of(policy->why));
        tg__json_close(&json, '}');
    }
    tg__json_close(&json, ']');
    tg__json_open(&json, "identities", '[');
    for (size_t i = 0; i < decision->identity_count; i++)
        tg__json_text(&json, NULL, tg_text_of(explanation->identities[i]));
    tg__json_close(&json, ']');
    tg__json_open(&json, "rules", '[');
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        tg_rule_text(&result->rule, rule);
        tg__json_open(&json, NULL, '{');
        tg__json_text(&json, "policy", tg_text_of(policy_of(explanation, result)));
        tg__json_text(&json, "rule", tg_text_of(rule));
        tg__json_text(&json, "identity", tg_text_of(explanation->identities[result->identity]));
        tg__json_flag(&json, "allowed", result->allowed);
        tg__json_number(&json, "limit", result->rule.limit);
        tg__json_number(&json, "remaining", result->remaining);
        tg__json_number(&json, "remaining_after", remaining_after(explanation, result));
        tg__json_wait(&json, "retry_after_us", result->retry_after_us);
        tg__json_wait(&json, "reset_after_us", result->reset_after_us);
        tg__json_number(&json, "delay_us", result->delay_us);
        tg__json_close(&json, '}');
    }
    tg__json_close(&json, ']');
    tg__json_open(&json, "decision", '{');
    tg__json_text(&json, "outcome", tg_text_of(outcome_word(explanation)));
    tg__json_text(&json, "policy", tg_text_of(judgement->policy));
    tg__json_text(&json, "missing", tg_text_of(judgement->missing));
    tg__json_flag(&json, "degraded", decision->degraded);
    tg__json_number(&json, "remaining", decision->remaining);
    tg__json_wait(&json, "retry_after_us", decision->retry_after_us);
    tg__json_close(&json, '}');
    tg__json_open(&json, "answer", '{');
    tg__json_number(&json, "status", (uint64_t)explanation->answer.status);
    tg__json_open(&json, "fields", '[');
    for (size_t i = 0; i < explanation->answer.field_count; i++) {
        tg__json_open(&json, NULL, '[');
        tg__json_text(&json, NULL, explanation->answer.fields[i].name);
        tg__json_text(&json, NULL, explanation->answer.fields[i].value);
        tg__json_close(&json, ']');
    }
    tg__json_close(&json, ']');
    tg__json_text(&json, "body", explanation->answer.body);
    tg__json_close(&json, '}');
    tg__json_close(&json, '}');
}

void
tg_explanation_write(const tg_explanation *explanation, bool json, tg_sink *sink, void *context)
{
    if (json)
        write_json(explanation, sink, context);
    else
        write_text(explanation, sink, context);
}
