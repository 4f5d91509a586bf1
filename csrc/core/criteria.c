/* A policy's `match`, one criterion at a time. */
#include "core/criteria.h"

#include <stdio.h>

size_t
tg__criteria_of(const tg_match *match, tg_criterion found[TG_CRITERIA_MAX])
{
    size_t count = 0;
    if (match && match->path_count)
        found[count++] = (tg_criterion){ "path", { .paths = match->paths, .path_count = match->path_count } };
    if (match && match->method_count)
        found[count++] = (tg_criterion){ "method", { .methods = match->methods, .method_count = match->method_count } };
    if (match && match->host_count)
        found[count++] = (tg_criterion){ "host", { .hosts = match->hosts, .host_count = match->host_count } };
    if (match && match->route_count)
        found[count++] = (tg_criterion){ "route", { .routes = match->routes, .route_count = match->route_count } };
    for (size_t i = 0; match && i < match->header_count; i++) {
        const bool last = count == TG_CRITERIA_MAX - 1;
        found[count++] = (tg_criterion){ "header", { .headers = &match->headers[i],
                                                     .header_count = last ? match->header_count - i : 1 } };
        if (last)
            break;
    }
    return count;
}

bool
tg__criterion_meets(const tg_criterion *criterion, const tg_request *request)
{
    tg_match only = criterion->only;
    tg_policy policy = { .match = &only };
    const tg_config config = { .policies = &policy, .policy_count = 1 };
    size_t found[TG_LIMITERS_MAX];
    return tg__config_match(&config, request, found) > 0;
}

size_t
tg__criterion_count(const tg_criterion *criterion)
{
    const tg_match *only = &criterion->only;
    return only->header_count ? only->headers[0].value_count
                              : only->path_count + only->method_count + only->host_count + only->route_count;
}

void
tg__criterion_text(const tg_criterion *criterion, size_t n, char *text, size_t size)
{
    const tg_match *only = &criterion->only;
    const tg_pattern *pattern = only->path_count    ? &only->paths[n]
                                : only->host_count   ? &only->hosts[n]
                                : only->route_count  ? &only->routes[n]
                                : only->header_count ? &only->headers[0].values[n]
                                                     : NULL;
    if (!pattern) {
        tg__text_show(only->methods[n], text, size);
        return;
    }
    size_t used = 0;
    const char *between = pattern->segments ? "{}" : "*";
    for (size_t i = 0; i < pattern->piece_count && used + 3 < size; i++) {
        for (const char *at = i ? between : ""; *at; at++)
            text[used++] = *at;
        size_t length = pattern->pieces[i].length;
        if (length > size - used - 1)
            length = size - used - 1;
        if (length)
            memcpy(text + used, pattern->pieces[i].data, length);
        used += length;
    }
    if (pattern->segments && pattern->open && used + 1 < size)
        text[used++] = '*';
    text[used] = '\0';
}
