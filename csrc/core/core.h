/* Joins the rooms: one decision over several rules and identities, the limiter, the gate.
 * Must not enter: sockets, Python, FastCGI, YAML, the layout of any store. */
#ifndef TG_CORE_H
#define TG_CORE_H

#include "base/base.h"
#include "identity/identity.h"
#include "stores/store.h"

struct tg_limiter {
    tg_store *store;         /* a reference */
    tg_store *local;         /* on_store_failure local: the embedded stand-in, else NULL */
    const tg_client *client; /* borrowed; may be NULL */
    char name[TG_NAME_BYTES_MAX + 1];
    tg_rule rules[TG_RULES_MAX];
    size_t rule_count;
    tg_by *by[TG_DIMENSIONS_MAX];
    size_t by_count;
    tg_on_failure on_store_failure;
    tg_on_full on_full;
    tg_missing missing_identity;
};

/* Fills everything of a decision but results and identities from its results: allowed, reported, the plain fields. */
void tg__decision_report(tg_decision *decision);

/* Which counts a rule shares: the digest of namespace, name, algorithm and period. */
void tg__rule_scope(tg_rule *rule, tg_text space, tg_text name);

#endif
