/* What an operator should know of this Redis and no request has to: asked by `tidegate check --live` only.
 * Must not enter: decisions, anything a site in service calls. */
#include "stores/redis/redis.h"

#include <stdio.h>
#include <stdlib.h>

#define PREFIX_BYTES 13 /* "tg1:0123abcd:" */
enum { ROUNDS_MAX = 50, KEYS_PER_ROUND = 500 }; /* of SCAN: 25 000 keys are enough of a sample */
#define ROUND_US UINT64_C(1000000)

/* Keys of one page that another secret than ours has made. false: the reply is none that SCAN gives. */
static bool
count_foreign(const tg_redis_wire *wire, const redisReply *reply, char cursor[32], size_t *ours, size_t *foreign)
{
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 || reply->element[0]->type != REDIS_REPLY_STRING ||
        reply->element[0]->len >= 32 || reply->element[1]->type != REDIS_REPLY_ARRAY)
        return false;
    memcpy(cursor, reply->element[0]->str, reply->element[0]->len + 1);
    for (size_t i = 0; i < reply->element[1]->elements; i++) {
        const redisReply *key = reply->element[1]->element[i];
        if (key->type != REDIS_REPLY_STRING || key->len <= PREFIX_BYTES || key->str[PREFIX_BYTES - 1] != ':')
            continue; /* the secret itself, a probe */
        const bool own = memcmp(key->str, wire->keyring.prefix, PREFIX_BYTES) == 0;
        *ours += own;
        *foreign += !own;
    }
    return true;
}

static tg_trouble
look_at_keys(tg_redis_store *store, tg_redis_wire *wire, tg_error *error)
{
    char cursor[32] = "0";
    size_t ours = 0, foreign = 0;
    for (int round = 0; round < ROUNDS_MAX; round++) {
        char bytes[256], count[16];
        tg_resp resp = { .data = bytes, .size = sizeof bytes };
        bool unsent;
        redisReply *reply = NULL;
        snprintf(count, sizeof count, "%d", KEYS_PER_ROUND);
        const char *const words[] = { "SCAN", cursor, "MATCH", "tg1:*", "COUNT", count };
        tg__resp_command(&resp, sizeof words / sizeof *words, words);
        struct iovec piece = { resp.data, resp.length };
        const uint64_t deadline_us = tg__monotonic_us() + ROUND_US;
        tg_trouble trouble = tg__wire_send(wire, &piece, 1, deadline_us, &unsent, error);
        if (trouble == TG__TROUBLE_NONE)
            trouble = tg__wire_reply(wire, deadline_us, &reply, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        const bool told = count_foreign(wire, reply, cursor, &ours, &foreign);
        if (!told)
            tg__notice("store-unchecked",
                       "%s: SCAN is refused (%.80s), so counts made under another secret are not looked for; +scan allows it",
                       store->address.shown, reply->type == REDIS_REPLY_ERROR ? reply->str : "an unexpected reply");
        freeReplyObject(reply);
        if (!told || strcmp(cursor, "0") == 0)
            break;
    }
    if (foreign)
        tg__notice("store-two-secrets",
                   "%s holds %zu keys made under another secret than this machine's, and %zu under this one: machines with "
                   "different secrets each let through the whole limit. Give all the same TIDEGATE_SECRET; keys of a former "
                   "one go as they expire",
                   store->address.shown, foreign, ours);
    return TG__TROUBLE_NONE;
}

tg_status
tg__redis_examine(tg_store *base, tg_error *error)
{
    tg_redis_store *store = (tg_redis_store *)base;
    tg_redis_wire *wire = NULL;
    if (atomic_load(&base->failing))
        return TG_OK; /* it was said when it was opened */
    tg_trouble trouble = tg__pool_take(store, tg__monotonic_us() + ROUND_US, &wire, error);
    if (trouble == TG__TROUBLE_NONE) {
        trouble = look_at_keys(store, wire, error);
        tg__pool_give(store, wire, trouble == TG__TROUBLE_NONE);
    }
    return trouble == TG__TROUBLE_NONE ? TG_OK : TG_E_STORE;
}
