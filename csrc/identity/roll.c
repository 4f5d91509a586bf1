/* Lists of clients: see roll.h. */
#include "identity/roll.h"

static bool
starts(tg_text text, const char *word, tg_text *rest)
{
    const size_t length = strlen(word);
    if (text.length < length || !tg__text_is_nocase((tg_text){ text.data, length }, word))
        return false;
    *rest = (tg_text){ text.data + length, text.length - length };
    return true;
}

tg_status
tg__roll_parse(tg_text text, tg_roll_entry *entry, tg_error *error)
{
    char shown[64];
    tg_text rest;
    *entry = (tg_roll_entry){ .kind = TG_ROLL_NETWORK };
    if (starts(text, "user:", &rest)) {
        entry->kind = TG_ROLL_USER;
        entry->value = rest;
        if (rest.length)
            return TG_OK;
        return tg__error(error, TG_E_CONFIG, "found \"user:\", expected a user's name behind it");
    }
    if (starts(text, "header:", &rest)) {
        const char *sign = rest.length ? memchr(rest.data, '=', rest.length) : NULL;
        entry->kind = TG_ROLL_HEADER;
        if (!sign || !tg__header_name((tg_text){ rest.data, (size_t)(sign - rest.data) }, &entry->header) ||
            sign + 1 == rest.data + rest.length) /* the value may be a secret: not shown */
            return tg__error(error, TG_E_CONFIG, "found no header and value behind \"header:\", expected "
                                                 "\"header:X-Api-Key=VALUE\"");
        entry->value = (tg_text){ sign + 1, (size_t)(rest.data + rest.length - sign - 1) };
        return TG_OK;
    }
    tg_error fault;
    if (tg__network_parse(text, &entry->network, &fault) == TG_OK)
        return TG_OK;
    if (text.length && ((text.data[0] >= '0' && text.data[0] <= '9') || memchr(text.data, ':', text.length) == text.data))
        return tg__error(error, TG_E_CONFIG, "%s", fault.message);
    return tg__error(error, TG_E_CONFIG, "found \"%s\", expected a network (\"10.0.0.0/8\"), \"user:NAME\" or "
                                         "\"header:NAME=VALUE\"",
                     tg__text_show(text, shown, sizeof shown));
}

static bool
equal(tg_text a, tg_text b)
{
    unsigned char differs = a.length != b.length;
    for (size_t i = 0; i < b.length; i++)
        differs |= (unsigned char)(b.data[i] ^ (i < a.length ? a.data[i] : 0));
    return differs == 0;
}

bool
tg__roll_holds(const tg_roll *roll, const tg_client *client, const tg_request *request)
{
    tg_address address;
    tg_text user, value;
    if (roll->count == 0)
        return false;
    const bool addressed = roll->has_network && tg__client_address(client, request, &address);
    const bool known = tg__client_user(client, request, &user);
    for (size_t i = 0; i < roll->count; i++) {
        const tg_roll_entry *entry = &roll->entries[i];
        bool held = false;
        switch (entry->kind) {
        case TG_ROLL_NETWORK:
            held = addressed && tg__network_holds(&entry->network, &address);
            break;
        case TG_ROLL_USER:
            held = known && equal(user, entry->value);
            break;
        case TG_ROLL_HEADER:
            held = tg__header_single(request, &entry->header, &value) && equal(value, entry->value);
            break;
        }
        if (held)
            return true;
    }
    return false;
}
