/* Reservations: taken on an estimate, held in the store by a lease, made what it really was.
 * Must not enter: how a store keeps a lease; sleeping. */
#include "core/inquiry.h"

#include <inttypes.h>

#define NO_PLACE UINT32_MAX

static void
hold_nothing(tg_reservation *reservation)
{
    memset(reservation->id, 0, sizeof reservation->id);
    memset(reservation->places, 0xff, sizeof reservation->places);
    reservation->until_us = 0;
}

static bool
holds_nothing(const tg_reservation *reservation)
{
    static const uint8_t nothing[sizeof reservation->id];
    return memcmp(reservation->id, nothing, sizeof nothing) == 0;
}

static tg_status
check_lease(const tg_limiter *limiter, uint64_t lease_us, tg_error *error)
{
    if (lease_us < TG_LEASE_US_MIN || lease_us > TG_LEASE_US_MAX)
        return tg__error(error, TG_E_ARG, "a lease is 1 s to a day long, not %" PRIu64 " us", lease_us);
    if (!limiter->store->ops->lease)
        return tg__error(error, TG_E_UNSUPPORTED, "store %s keeps no reservations: a table or Redis does",
                         limiter->store->ops->name);
    return TG_OK;
}

tg_status
tg_limiter_reserve(tg_limiter *limiter, const tg_dimension *dimensions, size_t dimension_count, uint64_t cost,
                   uint64_t lease_us, tg_reservation *reservation, tg_error *error)
{
    tg_store *store = limiter->store;
    tg_decision *decision = &reservation->decision;
    tg_target_list plan;
    tg_error told;
    tg_status status = check_lease(limiter, lease_us, error);
    if (status == TG_OK)
        status = tg__limiter_plan(limiter, dimensions, dimension_count, cost, &plan, decision, error);
    if (status != TG_OK)
        return status;
    hold_nothing(reservation);
    tg_lease lease = { .lease_us = lease_us, .places = reservation->places };
    bool overflow = false;
    const uint64_t began_ns = tg__decision_begun(limiter, TG_OP_HIT);
    status = store->ops->lease(store, TG_LEASE_TAKE, plan.targets, plan.count, &lease, decision->results, &overflow, &told);
    if (status == TG_E_STORE && lease.full) {
        hold_nothing(reservation);
        tg__decision_degraded(limiter, TG_OP_HIT, &plan, decision);
        if (error)
            *error = told;
        return status;
    }
    tg__decision_answered(limiter, TG_OP_HIT, &plan, decision, began_ns, status, &told);
    if (status == TG_OK) {
        decision->overflow = overflow;
        memcpy(reservation->id, lease.id, sizeof lease.id);
        if (!holds_nothing(reservation))
            reservation->until_us = lease.until_us;
    }
    for (size_t i = 0; i < decision->result_count; i++) {
        if (!decision->results[i].charged)
            reservation->places[i] = NO_PLACE;
        decision->results[i].charged = false; /* given back by settling, not by a refund */
    }
    return TG_OK;
}

/* What is held, in the order of `places`. */
static size_t
held_targets(const tg_reservation *reservation, tg_target targets[TG_TARGETS_MAX], uint32_t places[TG_TARGETS_MAX])
{
    const tg_decision *decision = &reservation->decision;
    size_t count = 0;
    for (size_t i = 0; i < decision->result_count; i++) {
        const tg_result *result = &decision->results[i];
        if (reservation->places[i] == NO_PLACE)
            continue;
        places[count] = reservation->places[i];
        targets[count++] = (tg_target){
            .rule = &result->rule,
            .identity = &decision->identities[result->identity],
            .cost = result->cost,
            .stamp_us = result->stamp_us,
            .own = true,
            .overflow = result->overflow,
        };
    }
    return count;
}

/* What a store has written into the places of held_targets. */
static void
keep_places(tg_reservation *reservation, const uint32_t *places)
{
    for (size_t i = 0; i < reservation->decision.result_count; i++)
        if (reservation->places[i] != NO_PLACE)
            reservation->places[i] = *places++;
}

tg_status
tg_reservation_settle(tg_limiter *limiter, tg_reservation *reservation, uint64_t actual, tg_error *error)
{
    tg_target targets[TG_TARGETS_MAX];
    uint32_t places[TG_TARGETS_MAX];
    if (actual > TG_LIMIT_MAX)
        return tg__error(error, TG_E_ARG, "a cost is at most %" PRIu64 ", not %" PRIu64, TG_LIMIT_MAX, actual);
    if (holds_nothing(reservation))
        return TG_OK;
    tg_lease lease = { .until_us = reservation->until_us, .actual = actual, .places = places };
    memcpy(lease.id, reservation->id, sizeof lease.id);
    const size_t count = held_targets(reservation, targets, places);
    tg_error told;
    const tg_status status =
        limiter->store->ops->lease(limiter->store, TG_LEASE_SETTLE, targets, count, &lease, NULL, NULL, &told);
    if (status == TG_OK) {
        tg__success_seen(limiter->store);
        hold_nothing(reservation);
    } else {
        keep_places(reservation, places); /* what is settled is not settled again */
        if (status == TG_E_STORE)
            tg__failure_seen(limiter->store, &told);
        if (error)
            *error = told;
    }
    return status;
}

tg_status
tg_reservation_renew(tg_limiter *limiter, tg_reservation *reservation, uint64_t lease_us, tg_error *error)
{
    tg_target targets[TG_TARGETS_MAX];
    uint32_t places[TG_TARGETS_MAX];
    tg_status status = check_lease(limiter, lease_us, error);
    if (status != TG_OK)
        return status;
    if (holds_nothing(reservation))
        return tg__error(error, TG_E_ARG, "this reservation holds nothing: it was refused, or is settled");
    tg_lease lease = { .lease_us = lease_us, .until_us = reservation->until_us, .places = places };
    memcpy(lease.id, reservation->id, sizeof lease.id);
    const size_t count = held_targets(reservation, targets, places);
    status = limiter->store->ops->lease(limiter->store, TG_LEASE_RENEW, targets, count, &lease, NULL, NULL, error);
    if (status == TG_OK && lease.over)
        return tg__error(error, TG_E_ARG, "this reservation's lease has ended: its units have been given back");
    if (status == TG_OK) {
        reservation->until_us = lease.until_us;
        keep_places(reservation, places);
    }
    return status;
}
