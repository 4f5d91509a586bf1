/* One request under judgement: see judging.h. */
#include "judging.h"

#include <stdlib.h>
#include <string.h>

#define SPARE_MAX 64u

/* ---- memory */

fcgi_judging *
fcgi_judging_new(fcgi_judge *judge)
{
    fcgi_judging *judging = judge->spare;
    tg_header *headers = NULL;
    size_t room = 0;
    if (judging) {
        judge->spare = judging->next;
        judge->spare_count--;
        headers = judging->headers;
        room = judging->header_room;
    } else if (!(judging = malloc(sizeof *judging))) {
        return NULL;
    }
    /* Judgements and answers are large, and written where they are made. */
    judging->judge = judge;
    judging->next = NULL;
    judging->stage = FCGI_STAGE_JUDGED;
    judging->ticket = NULL;
    judging->call = NULL;
    judging->under_way = 0;
    judging->status = TG_OK;
    judging->count = 0;
    judging->lines = NULL;
    judging->line_count = 0;
    judging->headers = headers;
    judging->header_room = room;
    return judging;
}

void
fcgi_judging_free(fcgi_judging *judging)
{
    fcgi_judge *judge = judging->judge;
    free(judging->lines);
    if (judge->spare_count < SPARE_MAX) {
        judging->next = judge->spare;
        judge->spare = judging;
        judge->spare_count++;
        return;
    }
    free(judging->headers);
    free(judging);
}

fcgi_judging *
fcgi_judging_keep(fcgi_judge *judge, const fcgi_judging *made, fcgi_stage stage)
{
    fcgi_judging *kept = fcgi_judging_new(judge);
    if (!kept)
        return NULL;
    kept->stage = stage;
    kept->count = made->count;
    memcpy(kept->judgements, made->judgements, made->count * sizeof *made->judgements);
    return kept;
}

/* ---- judging */

static void
on_judged(void *data, tg_status status, const tg_error *error)
{
    fcgi_judging *judging = data;
    judging->call = NULL;
    judging->status = status;
    judging->stage = FCGI_STAGE_JUDGED;
    if (status == TG_OK)
        judging->count++;
    else
        judging->error = *error;
    judging->judge->decided(judging->judge->loop, judging->ticket);
}

/* What it points to, of which the caller's copy goes. */
static bool
keep_request(fcgi_judging *judging, const tg_request *request)
{
    judging->request = *request;
    if (request->header_count > judging->header_room) {
        tg_header *grown = realloc(judging->headers, request->header_count * sizeof *grown);
        if (!grown)
            return false;
        judging->headers = grown;
        judging->header_room = request->header_count;
    }
    if (request->header_count)
        memcpy(judging->headers, request->headers, request->header_count * sizeof *request->headers);
    judging->request.headers = judging->headers;
    if (request->value_count)
        memcpy(judging->values, request->values, request->value_count * sizeof *request->values);
    judging->request.values = judging->values;
    judging->request.waited_us = judging->count ? judging->judgements[0].waited_us : 0;
    return true;
}

bool
fcgi_judging_begin(fcgi_judging *judging, const tg_request *request, uint64_t cost)
{
    const fcgi_judge *judge = judging->judge;
    tg_judgement *judgement = &judging->judgements[judging->count];
    const size_t prior_count = judging->count;
    judging->prior[0] = &judging->judgements[0].decision;
    judging->stage = FCGI_STAGE_JUDGED;
    if (!judge->client) {
        judging->status = tg_gate_judge(judge->gate, request, cost, judging->prior, prior_count, judgement,
                                        &judging->answer, &judging->error);
    } else if (!keep_request(judging, request)) {
        judging->status = judging->error.status = TG_E_NOMEM;
        memcpy(judging->error.message, "out of memory", sizeof "out of memory");
    } else {
        judging->status = tg_gate_judge_begin(judge->client, judge->gate, &judging->request, cost, judging->prior,
                                              prior_count, judgement, &judging->answer, on_judged, judging,
                                              &judging->call, &judging->error);
        if (judging->call) {
            judging->stage = FCGI_STAGE_JUDGING;
            return true;
        }
    }
    judging->count += judging->status == TG_OK;
    return false;
}

static void
on_line(void *data, tg_status status, const tg_error *error)
{
    fcgi_line *line = data;
    fcgi_judging *of = line->of;
    line->call = NULL;
    line->status = status;
    if (status != TG_OK)
        line->error = *error;
    if (--of->under_way > 0)
        return;
    of->stage = FCGI_STAGE_JUDGED;
    of->judge->decided(of->judge->loop, of->ticket);
}

bool
fcgi_judging_begin_lines(fcgi_judging *judging)
{
    const fcgi_judge *judge = judging->judge;
    judging->under_way = 1; /* this beginning: a line's answer may come from within that of another */
    judging->stage = FCGI_STAGE_JUDGING;
    for (size_t i = 0; i < judging->line_count; i++) {
        fcgi_line *line = &judging->lines[i];
        if (line->status != TG_OK)
            continue;
        line->of = judging;
        judging->under_way++;
        line->status = tg_gate_judge_begin(judge->client, judge->gate, &line->request, line->cost, NULL, 0,
                                           &line->judgement, NULL, on_line, line, &line->call, &line->error);
        if (!line->call)
            judging->under_way--;
    }
    if (--judging->under_way > 0)
        return true;
    judging->stage = FCGI_STAGE_JUDGED;
    return false;
}

/* ---- its fate */

static void
on_told(void *data, tg_status status, const tg_error *error)
{
    fcgi_judging *judging = data;
    if (status != TG_OK && !judging->judge->closed)
        fcgi_log_rarely(&judging->judge->told_gate, FCGI_WARN, "not-settled", "%s: %s", tg_status_name(error->status),
                        error->message);
    if (--judging->under_way == 0)
        fcgi_judging_free(judging);
}

void
fcgi_judging_settle(fcgi_judging *judging, int status, const tg_header *headers, size_t header_count)
{
    fcgi_judge *judge = judging->judge;
    tg_error error;
    judging->stage = FCGI_STAGE_ENDING;
    judging->under_way = 1;
    for (size_t i = 0; i < judging->count; i++) {
        if (!judging->judgements[i].settles)
            continue;
        tg_async_call *call = NULL;
        judging->under_way++;
        tg_judgement *judgement = &judging->judgements[i];
        const tg_status told =
            judge->client ? tg_gate_settle_begin(judge->client, judge->gate, judgement, status, headers, header_count,
                                                 on_told, judging, &call, &error)
                          : tg_gate_settle(judge->gate, judgement, status, headers, header_count, &error);
        if (!call)
            on_told(judging, told, &error);
    }
    on_told(judging, TG_OK, NULL);
}

void
fcgi_judging_give_back(fcgi_judging *judging)
{
    fcgi_judge *judge = judging->judge;
    tg_error error;
    judging->stage = FCGI_STAGE_ENDING;
    judging->under_way = 1;
    for (size_t i = 0; i < judging->count && !judge->closed; i++) {
        tg_async_call *call = NULL;
        judging->under_way++;
        tg_decision *decision = &judging->judgements[i].decision;
        const tg_status told =
            judge->client ? tg_decision_refund_begin(judge->client, decision, on_told, judging, &call, &error)
                          : tg_decision_refund(tg_gate_store(judge->gate), decision, &error);
        if (!call)
            on_told(judging, told, &error);
    }
    on_told(judging, TG_OK, NULL);
}

void
fcgi_judging_forget(fcgi_judging *judging)
{
    tg_async *client = judging->judge->client;
    if (judging->stage == FCGI_STAGE_HELD) {
        fcgi_judging_give_back(judging);
        return;
    }
    if (judging->call)
        tg_async_cancel(client, judging->call);
    for (size_t i = 0; i < judging->line_count; i++)
        if (judging->lines[i].call)
            tg_async_cancel(client, judging->lines[i].call);
    fcgi_judging_free(judging); /* what was taken stays taken */
}

void
fcgi_judge_close(fcgi_judge *judge)
{
    judge->closed = true;
    tg_async_close(judge->client);
    judge->client = NULL;
}

void
fcgi_judge_fini(fcgi_judge *judge)
{
    while (judge->spare) {
        fcgi_judging *next = judge->spare->next;
        free(judge->spare->headers);
        free(judge->spare);
        judge->spare = next;
    }
    judge->spare_count = 0;
}
