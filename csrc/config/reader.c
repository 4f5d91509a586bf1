/* The values of a rules file, taken out of the tree with their places: see reader.h. */
#include "config/reader.h"

#include "base/words.h"

#include <inttypes.h>

tg_status
tg__read_no_memory(const tg_reader *r)
{
    return tg__error(r->source.error, TG_E_NOMEM, "%s: out of memory while reading", r->source.path);
}

/* ---- mappings ---- */

size_t
tg__word_index(tg_text word, const char *const *words)
{
    for (size_t i = 0; words[i]; i++)
        if (tg__text_is(word, words[i]))
            return i;
    return SIZE_MAX;
}

static tg_status
unknown_key(const tg_reader *r, const tg_node *key, const tg_keys *allowed)
{
    char shown[80], list[330];
    const char *near = tg__word_nearest(key->text, allowed->known);
    tg__text_show(key->text, shown, sizeof shown);
    if (tg__word_index(key->text, allowed->later) != SIZE_MAX)
        return tg__source_error(&r->source, key->at, "found \"%s\" in %s, which is not available yet", shown,
                                allowed->where);
    if (near)
        return tg__source_error(&r->source, key->at, "found the unknown key \"%s\" in %s: did you mean \"%s\"?", shown,
                                allowed->where, near);
    return tg__source_error(&r->source, key->at, "found the unknown key \"%s\" in %s, expected %s", shown,
                            allowed->where, tg__words_list(allowed->known, list, sizeof list));
}

/* Sorts a mapping's values by key: values[i] belongs to known[i], NULL where it is not given. Every key is known and
 * stands there once, or it is an error. */
tg_status
tg__read_keys(const tg_reader *r, const tg_node *map, const tg_keys *allowed, const tg_node *values[TG_KEYS_MAX])
{
    char shown[96];
    const tg_node *names[TG_KEYS_MAX] = { 0 };
    for (size_t i = 0; i < TG_KEYS_MAX; i++)
        values[i] = NULL;
    if (map->kind != TG_NODE_MAP)
        return tg__source_error(&r->source, map->at, "found %s, expected %s: a mapping of keys to values",
                                tg__node_show(map, shown, sizeof shown), allowed->where);
    for (const tg_node *key = map->first; key; key = key->next->next) {
        const size_t index = tg__word_index(key->text, allowed->known);
        if (index == SIZE_MAX)
            return unknown_key(r, key, allowed);
        if (names[index])
            return tg__source_error(&r->source, key->at,
                                    "found \"%s\" a second time in %s: it already stands in line %u",
                                    allowed->known[index], allowed->where,
                                    tg__source_line(&r->source, names[index]->at));
        if (tg__node_is_nothing(key->next))
            return tg__source_error(&r->source, key->at, "found nothing behind \"%s:\", expected a value or no key",
                                    allowed->known[index]);
        names[index] = key;
        values[index] = key->next;
    }
    return TG_OK;
}

/* ---- values ---- */

tg_status
tg__want_text(const tg_reader *r, const tg_node *node, const char *what)
{
    char shown[96];
    if (node->kind == TG_NODE_SCALAR && !tg__node_is_nothing(node) && node->text.length > 0)
        return TG_OK;
    if (node->kind == TG_NODE_SCALAR && node->text.length == 0)
        return tg__source_error(&r->source, node->at, "found an empty text, expected %s", what);
    return tg__source_error(&r->source, node->at, "found %s, expected %s", tg__node_show(node, shown, sizeof shown),
                            what);
}

/* A list, or one entry alone. */
tg_status
tg__want_entries(const tg_reader *r, const tg_node *node, const char *what, const tg_node **first, size_t *count)
{
    char shown[96];
    if (node->kind == TG_NODE_MAP)
        return tg__source_error(&r->source, node->at, "found %s, expected %s or a list of them",
                                tg__node_show(node, shown, sizeof shown), what);
    *first = node->kind == TG_NODE_LIST ? node->first : node;
    *count = node->kind == TG_NODE_LIST ? node->count : 1;
    if (*count == 0)
        return tg__source_error(&r->source, node->at, "found an empty list, expected %s or a list of them", what);
    for (const tg_node *entry = *first; entry; entry = node->kind == TG_NODE_LIST ? entry->next : NULL) {
        const tg_status status = tg__want_text(r, entry, what);
        if (status != TG_OK)
            return status;
    }
    return TG_OK;
}

/* The next entry of what want_entries found. */
const tg_node *
tg__read_after(const tg_node *list, const tg_node *entry)
{
    return list->kind == TG_NODE_LIST ? entry->next : NULL;
}

tg_status
tg__read_kept(const tg_reader *r, tg_text text, tg_text *kept)
{
    const char *copy = tg__arena_copy(r->kept, text);
    if (!copy)
        return tg__read_no_memory(r);
    *kept = (tg_text){ copy, text.length };
    return TG_OK;
}

tg_status
tg__read_string(const tg_reader *r, const tg_node *node, const char *what, char **kept)
{
    tg_status status = tg__want_text(r, node, what);
    if (status != TG_OK)
        return status;
    if (memchr(node->text.data, '\0', node->text.length))
        return tg__source_error(&r->source, node->at, "found a NUL byte, expected %s", what);
    *kept = tg__arena_copy(r->kept, node->text);
    return *kept ? TG_OK : tg__read_no_memory(r);
}

tg_status
tg__read_name(const tg_reader *r, const tg_node *node, const char *what, char name[TG_NAME_BYTES_MAX + 1])
{
    char shown[96];
    const tg_status status = tg__want_text(r, node, what);
    if (status != TG_OK)
        return status;
    bool good = node->text.length <= TG_NAME_BYTES_MAX;
    for (size_t i = 0; good && i < node->text.length; i++) {
        const char c = node->text.data[i];
        good = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.' ||
               c == '-';
    }
    if (!good)
        return tg__source_error(&r->source, node->at,
                                "found %s, expected %s: 1 to %d of the characters A-Z a-z 0-9 _ . -",
                                tg__node_show(node, shown, sizeof shown), what, TG_NAME_BYTES_MAX);
    memcpy(name, node->text.data, node->text.length);
    name[node->text.length] = '\0';
    return TG_OK;
}

/* One of a few words; *choice is its place in the list. */
tg_status
tg__read_choice(const tg_reader *r, const tg_node *node, const char *const *words, size_t *choice)
{
    char shown[96], list[120];
    tg__words_list(words, list, sizeof list);
    *choice = node->kind == TG_NODE_SCALAR ? tg__word_index(node->text, words) : SIZE_MAX;
    if (*choice != SIZE_MAX)
        return TG_OK;
    const char *near = node->kind == TG_NODE_SCALAR ? tg__word_nearest(node->text, words) : NULL;
    return tg__source_error(&r->source, node->at, "found %s, expected %s%s%s%s",
                            tg__node_show(node, shown, sizeof shown), list, near ? ": did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

tg_status
tg__read_flag(const tg_reader *r, const tg_node *node, bool *flag)
{
    char shown[96];
    if (node->kind == TG_NODE_SCALAR && node->plain && tg__text_is(node->text, "true"))
        *flag = true;
    else if (node->kind == TG_NODE_SCALAR && node->plain && tg__text_is(node->text, "false"))
        *flag = false;
    else
        return tg__source_error(&r->source, node->at, "found %s, expected true or false",
                                tg__node_show(node, shown, sizeof shown));
    return TG_OK;
}

/* What another room's parser found wrong, at its place in the file. */
tg_status
tg__read_number(const tg_reader *r, const tg_node *node, uint64_t least, uint64_t most, uint64_t *number)
{
    char shown[96];
    if (node->kind == TG_NODE_SCALAR && node->plain && tg__text_number(node->text, most, number) && *number >= least)
        return TG_OK;
    return tg__source_error(&r->source, node->at, "found %s, expected a whole number from %" PRIu64 " to %" PRIu64,
                            tg__node_show(node, shown, sizeof shown), least, most);
}

tg_status
tg__read_fault(const tg_reader *r, const tg_node *scalar, const tg_error *fault, bool placed)
{
    if (fault->status == TG_E_NOMEM)
        return tg__read_no_memory(r);
    return tg__source_error(&r->source, placed ? tg__node_at(&r->source, scalar, fault->offset) : scalar->at, "%s",
                            fault->message);
}
