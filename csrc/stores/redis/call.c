/* From targets to the words of a command.
 * Must not enter: sockets, replies. */
#include "stores/redis/redis.h"

#define DESCRIPTION_BYTES 52
#define PATIENCE_BYTES 8 /* behind it, where there is any */
_Static_assert(DESCRIPTION_BYTES == 52 && DESCRIPTION_BYTES + PATIENCE_BYTES == 60, "as put_description says");

static bool
same_counts(const tg_target *a, const tg_target *b)
{
    return memcmp(a->rule->scope, b->rule->scope, sizeof a->rule->scope) == 0 &&
           (a->identity == b->identity ||
            (a->identity->length == b->identity->length &&
             memcmp(a->identity->bytes, b->identity->bytes, a->identity->length) == 0));
}

void
tg__call_plan(tg_call *call, tg_op op, const tg_target *targets, size_t target_count)
{
    *call = (tg_call){ .key_count = 0 };
    for (size_t i = 0; i < target_count; i++) {
        call->first_of[i] = (uint8_t)i;
        if (targets[i].rule->algorithm == TG_DENY) {
            call->denied = true;
            continue;
        }
        for (size_t j = 0; j < i; j++)
            if (targets[j].rule->algorithm != TG_DENY && same_counts(&targets[i], &targets[j])) {
                call->first_of[i] = (uint8_t)j;
                break;
            }
        if (call->first_of[i] == i)
            call->key_of[i] = (uint8_t)++call->key_count;
        else if (op == TG_OP_REFUND)
            continue; /* charged once, given back once */
        else
            call->key_of[i] = call->key_of[call->first_of[i]];
        call->asked++;
        call->algorithms |= 1u << targets[i].rule->algorithm;
        call->counts_denied |= targets[i].counts_denied != 0;
    }
}

static void
put_keys(tg_resp *resp, const tg_redis_store *store, const tg_redis_keyring *keyring, const tg_call *call,
         const tg_target *targets, size_t target_count)
{
    char key[TG__REDIS_KEY_MAX];
    const size_t prefix_length = strlen(keyring->prefix);
    size_t identity_end = 0;
    const tg_identity *written = NULL; /* whose text stands in `key`; targets of one identity come behind each other */
    memcpy(key, keyring->prefix, prefix_length);
    for (size_t i = 0; i < target_count; i++) {
        if (call->key_of[i] == 0 || call->first_of[i] != i)
            continue;
        if (targets[i].identity != written) {
            written = targets[i].identity;
            identity_end = prefix_length + tg__redis_identity_text(keyring, written, key + prefix_length);
            key[identity_end++] = '}';
        }
        const size_t suffix_length = tg__redis_names_suffix(store->names, targets[i].rule, key + identity_end);
        tg__resp_bulk(resp, key, identity_end + suffix_length);
    }
}

/* What common.lua's rule_of() and more.lua's refund_of() read: a bulk string of one of two lengths. */
static void
put_description(tg_resp *resp, const tg_target *target, uint8_t key, bool follows)
{
    const tg_rule *rule = target->rule;
    const bool patient = target->patience_us > 0;
    uint8_t *at = (uint8_t *)tg__resp_room(resp, 5 + DESCRIPTION_BYTES + (patient ? PATIENCE_BYTES : 0) + 2);
    if (!at)
        return;
    memcpy(at, patient ? "$60\r\n" : "$52\r\n", 5);
    at += 5;
    *at++ = rule->algorithm;
    *at++ = key;
    *at++ = (uint8_t)(target->charged | (follows ? 2 : 0) | (target->forced ? 4 : 0) | target->counts_denied << 3);
    at = tg__put_number(at, (double)rule->limit);
    at = tg__put_number(at, (double)rule->burst);
    at = tg__put_number(at, (double)rule->period_us);
    at = tg__put_number(at, (double)target->cost);
    at = tg__put_number(at, rule->algorithm == TG_FIXED_WINDOW ? (rule->aligned ? 1 : 0) : (double)rule->resolution_us);
    *at++ = target->own;
    /* Before 1970 a week's start is two's complement. */
    at = tg__put_number(at, rule->algorithm == TG_FIXED_WINDOW ? (double)(int64_t)target->stamp_us
                                                           : (double)target->stamp_us);
    if (patient)
        at = tg__put_number(at, (double)target->patience_us);
    memcpy(at, "\r\n", 2);
}

void
tg__call_arguments(tg_resp *resp, const tg_redis_store *store, const tg_redis_keyring *keyring, tg_op op,
                   const tg_call *call, const tg_target *targets, size_t target_count, uint64_t manual_now_us)
{
    if (op == TG_OP_RESET) {
        put_keys(resp, store, keyring, call, targets, target_count);
        return;
    }
    const char digits[2] = { (char)('0' + call->key_count / 10), (char)('0' + call->key_count % 10) };
    const bool short_one = call->key_count < 10;
    tg__resp_bulk(resp, digits + short_one, sizeof digits - short_one);
    put_keys(resp, store, keyring, call, targets, target_count);
    uint8_t header[9 + 8 + 8 + 8], *at = tg__put_number(header, store->manual ? (double)manual_now_us : -1.0);
    *at++ = call->knocks ? 5 : !call->lease ? op != TG_OP_HIT || call->denied : call->denied ? 1 : (uint8_t)(2 + call->lease_op);
    if (call->lease) {
        memcpy(at, call->lease->id, 8);
        at += 8;
        if (call->lease_op != TG_LEASE_TAKE)
            at = tg__put_number(at, (double)call->lease->until_us);
        at = tg__put_number(at, call->lease_op == TG_LEASE_SETTLE ? (double)call->lease->actual
                                                              : (double)call->lease->lease_us);
    }
    tg__resp_bulk(resp, header, (size_t)(at - header));
    for (size_t i = 0; i < target_count; i++)
        if (call->key_of[i] != 0)
            put_description(resp, &targets[i], call->key_of[i], call->first_of[i] != i);
}

void
tg__call_head(tg_resp *resp, const tg_redis_store *store, const tg_call *call, tg_op op, bool whole)
{
    tg__resp_count(resp, '*', op == TG_OP_RESET ? 1 + call->key_count : 4 + call->key_count + call->asked);
    if (op == TG_OP_RESET) {
        tg__resp_bulk(resp, "DEL", 3);
    } else if (whole) {
        tg__resp_bulk(resp, "EVAL", 4);
        tg__resp_count(resp, '$', tg__redis_script(tg__call_script(call, op)).length);
    } else {
        static const char evalsha[] = "$7\r\nEVALSHA\r\n$40\r\n";
        char *const at = tg__resp_room(resp, sizeof evalsha - 1 + 40 + 2);
        if (!at)
            return;
        memcpy(at, evalsha, sizeof evalsha - 1);
        memcpy(at + sizeof evalsha - 1, store->sha[tg__call_script(call, op)], 40);
        memcpy(at + sizeof evalsha - 1 + 40, "\r\n", 2);
    }
}

tg_script
tg__call_script(const tg_call *call, tg_op op)
{
    if (call->lease && call->lease_op != TG_LEASE_TAKE)
        return TG__SCRIPT_SETTLE;
    if (op == TG_OP_REFUND)
        return TG__SCRIPT_REFUND;
    return call->lease || call->counts_denied ? TG__SCRIPT_HIT_MORE : tg__redis_hit_script(call->algorithms);
}

bool
tg__call_answer_alone(const tg_call *call, tg_op op, size_t target_count, tg_result *results)
{
    if (call->asked > 0)
        return false;
    if (op == TG_OP_HIT || op == TG_OP_PEEK)
        for (size_t i = 0; i < target_count; i++) {
            results[i].allowed = results[i].charged = false;
            results[i].remaining = results[i].reset_after_us = results[i].delay_us = results[i].stamp_us = 0;
            results[i].retry_after_us = TG_NEVER;
        }
    return true;
}
