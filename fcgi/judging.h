/* One request under judgement: what it needs while the store is asked, whether that is waited for (a table answers at
 * once) or not (Redis), and what is told to the store when its fate is known. Must not enter: parameters' names, texts of
 * answers, sockets. */
#ifndef TIDEGATE_FCGI_JUDGING_H
#define TIDEGATE_FCGI_JUDGING_H

#include "log.h"
#include "tidegate.h"

typedef struct fcgi_judging fcgi_judging;

/* One per loop: not for several threads. */
typedef struct fcgi_judge {
    tg_gate *gate;
    tg_async *client; /* NULL: the store answers at once */
    void (*decided)(void *loop, void *ticket); /* a judgement that was under way is there */
    void *loop;
    fcgi_judging *spare;
    size_t spare_count;
    bool closed;
    fcgi_log_gate told_gate;
} fcgi_judge;

typedef enum fcgi_stage {
    FCGI_STAGE_JUDGING, /* its question is under way */
    FCGI_STAGE_JUDGED,  /* the judgement is there */
    FCGI_STAGE_BODY,    /* let through so far; its body is waited for */
    FCGI_STAGE_HELD,    /* let through, and not gone on yet: its place is given back if it goes */
    FCGI_STAGE_PASSED,  /* gone on; its answer may yet change what it cost */
    FCGI_STAGE_ENDING   /* nobody waits for it any more; the store is being told */
} fcgi_stage;

typedef struct fcgi_line fcgi_line;

struct fcgi_judging {
    fcgi_judge *judge;
    fcgi_judging *next; /* of the spare */
    fcgi_stage stage;
    void *ticket; /* the loop's, while JUDGING */
    tg_async_call *call;
    size_t under_way; /* calls of an end, or lines of a batch */
    tg_status status;
    tg_error error;
    size_t count; /* judgements that stand */
    tg_judgement judgements[2]; /* before the body, and with it */
    const tg_decision *prior[1];
    tg_request request;
    tg_part values[TG_DIMENSIONS_MAX];
    uint64_t cost;
    fcgi_line *lines; /* a batch; owned */
    size_t line_count;
    tg_answer answer;
    tg_header *headers; /* owned; room for header_room */
    size_t header_room;
};

/* One decision of a batch. */
struct fcgi_line {
    fcgi_judging *of;
    tg_async_call *call;
    tg_status status;
    tg_error error; /* also where it was asked wrongly: TG_E_ARG */
    tg_request request;
    tg_part values[TG_DIMENSIONS_MAX];
    uint64_t cost;
    tg_judgement judgement;
};

/* NULL: out of memory. */
fcgi_judging *fcgi_judging_new(fcgi_judge *judge);
void fcgi_judging_free(fcgi_judging *judging);

/* A copy of judgements that were made without waiting, for what is yet to come. NULL: out of memory. */
fcgi_judging *fcgi_judging_keep(fcgi_judge *judge, const fcgi_judging *made, fcgi_stage stage);

/* Judges `request` at `cost`, where one judgement stands already in view of that: into judgements[count], which is
 * counted when it is there. What the request points to stays as it is until then, but for its headers and values, which
 * are copied. true: under way, the stage is JUDGING and `decided` comes. false: JUDGED. The status says whether it could
 * be judged. */
bool fcgi_judging_begin(fcgi_judging *judging, const tg_request *request, uint64_t cost);
/* All lines whose status is TG_OK, each by itself, in order. */
bool fcgi_judging_begin_lines(fcgi_judging *judging);

/* What becomes of it; in each case it is the caller's no more. */
void fcgi_judging_settle(fcgi_judging *judging, int status, const tg_header *headers, size_t header_count);
void fcgi_judging_give_back(fcgi_judging *judging); /* what it took */
void fcgi_judging_forget(fcgi_judging *judging);    /* whoever asked has gone: as its stage says */

void fcgi_judge_close(fcgi_judge *judge); /* before its loop is closed */
void fcgi_judge_fini(fcgi_judge *judge);  /* afterwards */

#endif
