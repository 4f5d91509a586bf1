/* From a script's answer to results. The script says whether the hit fits and shows each state as it was; the numbers a
 * client is told are then worked out here, by the same functions that every store uses.
 * Must not enter: sockets, keys.
 *
 * The answer comes from outside: a number that no script of ours would write makes the whole of it unreadable. */
#include "stores/redis/redis.h"

#define EXACT_MAX 9007199254740992.0 /* 2^53 */
#define HEADER_BYTES 9

typedef struct tg_reading {
    const uint8_t *at, *end;
    bool bad;
} tg_reading;

static uint8_t
read_byte(tg_reading *reading)
{
    if (reading->at == reading->end) {
        reading->bad = true;
        return 0;
    }
    return *reading->at++;
}

/* A double, little-endian, that is a whole number within what doubles count exactly. */
static int64_t
read_number(tg_reading *reading)
{
    if (reading->end - reading->at < 8) {
        reading->bad = true;
        return 0;
    }
    uint64_t bits = 0;
    for (unsigned i = 0; i < 8; i++)
        bits |= (uint64_t)reading->at[i] << (8 * i);
    reading->at += 8;
    double number;
    memcpy(&number, &bits, sizeof number);
    if (!(number >= -EXACT_MAX && number <= EXACT_MAX) || number != (double)(int64_t)number) {
        reading->bad = true;
        return 0;
    }
    return (int64_t)number;
}

static uint64_t
read_count(tg_reading *reading)
{
    const int64_t number = read_number(reading);
    if (number < 0)
        reading->bad = true;
    return number < 0 ? 0 : (uint64_t)number;
}

/* ---- states ---- */

typedef struct tg_seen {
    tg_state state;
    /* the log's four numbers; a time of -1: there is none */
    uint64_t units;
    int64_t newest_us, makes_room_us, last_us;
} tg_seen;

static void
read_state(tg_reading *reading, const tg_rule *rule, tg_seen *seen)
{
    *seen = (tg_seen){ .newest_us = -1, .makes_room_us = -1, .last_us = -1 };
    tg_reading piece = { .at = reading->at };
    const uint8_t length = read_byte(reading);
    if (reading->bad || length > reading->end - reading->at) {
        reading->bad = true;
        return;
    }
    piece = (tg_reading){ .at = reading->at, .end = reading->at + length };
    reading->at += length;
    if (length == 0 && rule->algorithm != TG_SLIDING_LOG)
        return;
    switch (rule->algorithm) {
    case TG_FIXED_WINDOW:
        seen->state.fixed.count = read_count(&piece);
        seen->state.fixed.start_us = (uint64_t)read_number(&piece); /* a week may begin before 1970 */
        seen->state.fixed.running = (uint64_t)read_byte(&piece) + 1; /* which of the two kinds: see fixed_window.c */
        break;
    case TG_SLIDING_COUNTER:
        seen->state.counter.index = read_count(&piece);
        seen->state.counter.current = read_count(&piece);
        seen->state.counter.previous = read_count(&piece);
        break;
    case TG_SLIDING_LOG:
        seen->units = read_count(&piece);
        seen->newest_us = read_number(&piece);
        seen->makes_room_us = read_number(&piece);
        seen->last_us = read_number(&piece);
        break;
    default: {
        const tg_u128 units = read_count(&piece);
        const tg_u128 level = units * rule->period_us + read_count(&piece);
        seen->state.bucket.level_low = (uint64_t)level;
        seen->state.bucket.level_high = (uint64_t)(level >> 64);
        seen->state.bucket.at_us = read_count(&piece);
    }
    }
    if (piece.bad || piece.at != piece.end)
        reading->bad = true;
}

/* ---- verdicts ---- */

static tg_terms
terms_of(const tg_target *target)
{
    return (tg_terms){ .patience_us = target->patience_us, .forced = target->forced && !target->charged };
}

/* What a hit takes of a log. */
static uint64_t
log_cost(const tg_target *target, const tg_seen *seen)
{
    const uint64_t room = seen->units < TG_LOG_HELD_MAX ? TG_LOG_HELD_MAX - seen->units : 0;
    return terms_of(target).forced && target->cost > room ? room : target->cost;
}

/* The log's, from what the script found in it. */
static tg_verdict
log_verdict(const tg_target *target, const tg_seen *seen, uint64_t now_us)
{
    const tg_rule *rule = target->rule;
    if (seen->newest_us >= 0 && (uint64_t)seen->newest_us > now_us)
        now_us = (uint64_t)seen->newest_us;
    const uint64_t own = !target->charged ? 0 : target->cost < seen->units ? target->cost : seen->units;
    const uint64_t used = seen->units - own;
    const uint64_t room = rule->limit > used ? rule->limit - used : 0;
    const bool forced = terms_of(target).forced;
    const uint64_t cost = log_cost(target, seen);
    tg_verdict verdict = { .allowed = forced || cost <= room, .remaining = room, .stamp_us = now_us };
    if (seen->last_us >= 0)
        verdict.reset_after_us = (uint64_t)seen->last_us + rule->period_us - now_us;
    if (verdict.allowed) {
        verdict.remaining = room > cost ? room - cost : 0;
        if (cost > 0 && !target->charged)
            verdict.reset_after_us = rule->period_us;
    } else {
        verdict.retry_after_us = target->cost > rule->limit
                                     ? TG_NEVER
                                     : (uint64_t)seen->makes_room_us + rule->period_us - now_us;
    }
    return verdict;
}

/* Of the state as it is, nothing taken. */
static void
tell_untouched(const tg_rule *rule, const tg_seen *seen, uint64_t now_us, tg_verdict *verdict)
{
    if (rule->algorithm == TG_SLIDING_LOG) {
        if (seen->newest_us >= 0 && (uint64_t)seen->newest_us > now_us)
            now_us = (uint64_t)seen->newest_us;
        verdict->remaining = rule->limit > seen->units ? rule->limit - seen->units : 0;
        verdict->reset_after_us = seen->last_us >= 0 ? (uint64_t)seen->last_us + rule->period_us - now_us : 0;
        return;
    }
    tg_state unwritten;
    const tg_verdict untouched = tg__decide(rule, &seen->state, now_us, 0, &unwritten);
    verdict->remaining = untouched.remaining;
    verdict->reset_after_us = untouched.reset_after_us;
}

static tg_verdict
verdict_of(const tg_target *target, const tg_seen *seen, uint64_t now_us, tg_state *next)
{
    *next = seen->state;
    if (target->rule->algorithm == TG_SLIDING_LOG)
        return log_verdict(target, seen, now_us);
    if (target->charged)
        return tg__decide_charged(target->rule, &seen->state, now_us, target->cost);
    if (target->forced || target->patience_us > 0) {
        tg_verdict verdict;
        tg__decide_on_terms(target->rule, &seen->state, now_us, target->cost, terms_of(target), next, &verdict);
        return verdict;
    }
    return tg__decide(target->rule, &seen->state, now_us, target->cost, next);
}

/* What a hit has made of a state. */
static tg_seen
taken_from(const tg_target *target, const tg_seen *seen, const tg_state *next, uint64_t now_us)
{
    tg_seen after = *seen;
    after.state = *next;
    if (target->rule->algorithm == TG_SLIDING_LOG) {
        if (seen->newest_us < (int64_t)now_us)
            after.newest_us = (int64_t)now_us;
        after.units += log_cost(target, seen);
        after.last_us = after.newest_us;
    }
    return after;
}

bool
tg__redis_answer_read(tg_text answer, tg_op op, const tg_target *targets, const uint8_t *first_of, size_t target_count,
                      bool denied, tg_result *results, uint64_t *server_now_us)
{
    tg_reading reading = { .at = (const uint8_t *)answer.data, .end = (const uint8_t *)answer.data + answer.length };
    if (answer.length < HEADER_BYTES)
        return false;
    const bool script_allowed = read_byte(&reading) == 1;
    const uint64_t now_us = read_count(&reading);
    if (reading.bad)
        return false;
    tg_seen seen[TG_TARGETS_MAX];
    tg_state next[TG_TARGETS_MAX];
    tg_verdict verdicts[TG_TARGETS_MAX];
    bool fits = true;
    for (size_t i = 0; i < target_count; i++) {
        if (targets[i].rule->algorithm == TG_DENY) {
            verdicts[i] = (tg_verdict){ .retry_after_us = TG_NEVER };
            continue;
        }
        read_state(&reading, targets[i].rule, &seen[i]);
        if (reading.bad)
            return false;
        verdicts[i] = verdict_of(&targets[i], &seen[i], now_us, &next[i]);
        if (verdicts[i].reset_after_us > TG_WAIT_US_MAX ||
            (verdicts[i].retry_after_us > TG_WAIT_US_MAX && verdicts[i].retry_after_us != TG_NEVER))
            return false; /* a time that the script could not have found in that log */
        fits = fits && verdicts[i].allowed;
    }
    if (reading.at != reading.end || fits != script_allowed)
        return false;
    *server_now_us = now_us;
    const bool taken = op == TG_OP_HIT && fits && !denied;
    for (size_t i = 0; i < target_count; i++) {
        tg_verdict *verdict = &verdicts[i];
        const size_t first = first_of[i];
        const tg_target *payer = &targets[first];
        const bool paid = taken && !payer->charged && payer->cost > 0;
        bool charged = false;
        if (targets[i].rule->algorithm == TG_DENY) {
            ;
        } else if (first != i) { /* a second rule on the same counts: charged once, it tells of the state after that */
            const tg_seen after = paid ? taken_from(payer, &seen[first], &next[first], now_us) : seen[i];
            tell_untouched(targets[i].rule, &after, now_us, verdict);
        } else if (paid) {
            charged = true;
        } else if (verdict->allowed && targets[i].cost > 0) { /* taken by none, or paid before: as it stands now */
            tell_untouched(targets[i].rule, &seen[i], now_us, verdict);
        }
        tg_result *result = &results[i];
        result->allowed = verdict->allowed;
        result->charged = charged;
        result->remaining = verdict->remaining;
        result->retry_after_us = verdict->retry_after_us;
        result->reset_after_us = verdict->reset_after_us;
        result->delay_us = verdict->delay_us;
        result->stamp_us = verdict->stamp_us;
    }
    return true;
}
