/* From a script's answer to results. The script says whether the hit fits and shows each state as it was; the numbers a
 * client is told are then worked out by the same functions that every store uses.
 * Must not enter: sockets, keys.
 *
 * The answer comes from outside: a number that no script of ours would write makes the whole of it unreadable. */
#include "stores/redis/redis.h"
#include "stores/sight.h"

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
    const double number = tg__get_number(reading->at);
    reading->at += 8;
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

static void
read_state(tg_reading *reading, const tg_rule *rule, uint64_t now_us, tg_sight *seen)
{
    *seen = (tg_sight){ .now_us = now_us };
    if (rule->algorithm == TG_SLIDING_LOG)
        seen->log.newest_us = seen->log.makes_room_us = seen->log.last_us = seen->log.leaves_us = -1;
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
        seen->log.units = read_count(&piece);
        seen->log.newest_us = read_number(&piece);
        seen->log.makes_room_us = read_number(&piece);
        seen->log.last_us = read_number(&piece);
        seen->log.leaves_us = read_number(&piece);
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

/* ---- the whole ---- */

bool
tg__redis_answer_read(tg_text answer, tg_op op, const tg_target *targets, const uint8_t *first_of, size_t target_count,
                      bool denied, tg_result *results, uint64_t *server_now_us)
{
    tg_reading reading = { .at = (const uint8_t *)answer.data, .end = (const uint8_t *)answer.data + answer.length };
    if (answer.length < HEADER_BYTES)
        return false;
    const uint8_t said = read_byte(&reading);
    const uint64_t now_us = read_count(&reading);
    if (reading.bad)
        return false;
    tg_sight seen[TG_TARGETS_MAX];
    for (size_t i = 0; i < target_count; i++) {
        if (targets[i].rule->algorithm != TG_DENY)
            read_state(&reading, targets[i].rule, now_us, &seen[i]);
        if (reading.bad)
            return false;
    }
    if (reading.at != reading.end ||
        !tg__sights_tell(op, targets, first_of, target_count, denied, seen, now_us, said == 3 && denied ? -1 : said == 1, results))
        return false;
    *server_now_us = now_us;
    for (size_t i = 0; i < target_count; i++)
        if (targets[i].sight && targets[i].rule->algorithm != TG_DENY)
            *targets[i].sight = seen[i];
    return true;
}
