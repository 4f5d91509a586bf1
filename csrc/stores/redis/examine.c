/* What an operator should know of this Redis and no request has to: asked by `tidegate check --live` only.
 * Must not enter: decisions, anything a site in service calls. */
#include "stores/redis/redis.h"

#include <stdio.h>
#include <stdlib.h>

#define PREFIX_BYTES 13 /* "tg1:0123abcd:" */
enum { ROUNDS_MAX = 50, KEYS_PER_ROUND = 500 }; /* of SCAN: 25 000 keys are enough of a sample */
#define ROUND_US UINT64_C(1000000)

static uint64_t
round_until(uint64_t until_us)
{
    const uint64_t round_us = tg__monotonic_us() + ROUND_US;
    return round_us < until_us ? round_us : until_us;
}

/* Keys of one page that another secret than ours has made. false: the reply is none that SCAN gives. */
static bool
count_foreign(const tg_redis_keyring *keyring, const redisReply *reply, char cursor[32], tg_key_sample *sample)
{
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 || reply->element[0]->type != REDIS_REPLY_STRING ||
        reply->element[0]->len >= 32 || reply->element[1]->type != REDIS_REPLY_ARRAY)
        return false;
    memcpy(cursor, reply->element[0]->str, reply->element[0]->len + 1);
    for (size_t i = 0; i < reply->element[1]->elements; i++) {
        const redisReply *key = reply->element[1]->element[i];
        if (key->type != REDIS_REPLY_STRING || key->len <= PREFIX_BYTES || key->str[PREFIX_BYTES - 1] != ':')
            continue; /* the secret itself, a probe */
        const bool own = memcmp(key->str, keyring->prefix, PREFIX_BYTES) == 0;
        sample->ours += own;
        sample->foreign += !own;
    }
    return true;
}

static tg_trouble
look_at_keys(tg_redis_store *store, tg_redis_wire *wire, const tg_redis_keyring *keyring, uint64_t until_us,
             tg_key_sample *sample, tg_error *error)
{
    char cursor[32] = "0";
    for (int round = 0; round < ROUNDS_MAX && (round == 0 || tg__monotonic_us() < until_us); round++) {
        char bytes[256], count[16];
        tg_resp resp = { .data = bytes, .size = sizeof bytes };
        bool unsent;
        tg_heard heard = { .reply = NULL };
        snprintf(count, sizeof count, "%d", KEYS_PER_ROUND);
        const char *const words[] = { "SCAN", cursor, "MATCH", "tg1:*", "COUNT", count };
        tg__resp_command(&resp, sizeof words / sizeof *words, words);
        struct iovec piece = { resp.data, resp.length };
        const uint64_t deadline_us = round_until(until_us);
        tg_trouble trouble = tg__wire_send(wire, &piece, 1, deadline_us, &unsent, error);
        if (trouble == TG__TROUBLE_NONE)
            trouble = tg__wire_hear(wire, deadline_us, &heard, error);
        if (trouble != TG__TROUBLE_NONE)
            return trouble;
        const bool told = count_foreign(keyring, heard.reply, cursor, sample);
        if (!told)
            tg__notice("store-unchecked",
                       "%s: SCAN is refused (%.80s), so counts made under another secret are not looked for; +scan allows it",
                       store->address.shown, heard.reply->type == REDIS_REPLY_ERROR ? heard.reply->str : "an unexpected reply");
        tg__heard_forget(&heard);
        if (!told || strcmp(cursor, "0") == 0)
            break;
    }
    return TG__TROUBLE_NONE;
}

tg_trouble
tg__examine_server(tg_redis_store *server, const tg_redis_keyring *keyring, uint64_t until_us, tg_key_sample *sample,
                   tg_error *error)
{
    tg_redis_wire *wire = NULL;
    tg_trouble trouble = tg__pool_take(server, 0, round_until(until_us), &wire, error);
    if (trouble != TG__TROUBLE_NONE)
        return trouble;
    if (!keyring && !server->cluster)
        keyring = &wire->keyring;
    if (keyring)
        trouble = look_at_keys(server, wire, keyring, until_us, sample, error);
    tg__pool_give(server, wire, trouble == TG__TROUBLE_NONE);
    return trouble;
}

void
tg__examine_tell(const char *shown, const tg_key_sample *sample)
{
    if (sample->foreign)
        tg__notice("store-two-secrets",
                   "%s holds %zu keys made under another secret than this machine's, and %zu under this one: machines with "
                   "different secrets each let through the whole limit. Give all the same TIDEGATE_SECRET; keys of a former "
                   "one go as they expire",
                   shown, sample->foreign, sample->ours);
}

tg_status
tg__redis_examine(tg_store *base, tg_error *error)
{
    tg_redis_store *store = (tg_redis_store *)base;
    tg_key_sample sample = { 0 };
    if (atomic_load(&base->failing))
        return TG_OK; /* it was said when it was opened */
    const tg_trouble trouble = tg__examine_server(store, NULL, tg__monotonic_us() + TG__EXAMINE_US, &sample, error);
    tg__examine_tell(store->address.shown, &sample);
    return trouble == TG__TROUBLE_NONE ? TG_OK : TG_E_STORE;
}
