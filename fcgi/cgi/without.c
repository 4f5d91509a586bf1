/* What tidegate-cgi does without: these take the place of the library's own, so that neither libyaml nor hiredis is part
 * of the program, and their loading no part of a request.
 * Must not enter: anything else. */
#include "config/yaml_tree.h"
#include "stores/store.h"

tg_status
tg__yaml_read(const tg_source *source, tg_node **root)
{
    *root = NULL;
    return tg__source_error(source, 0, "found rules as they are written, expected compiled ones: run tidegate compile");
}

tg_status
tg__redis_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error)
{
    (void)uri, (void)options, (void)store;
    return tg__error(error, TG_E_UNSUPPORTED, "tidegate-cgi counts in a table alone (shared://NAME): with Redis a request "
                                              "would wait for a connection of its own; ask tidegate-fcgi instead");
}

tg_status
tg__tiered_open(const tg_store_uri *uri, const tg_store_options *options, tg_store **store, tg_error *error)
{
    return tg__redis_open(uri, options, store, error);
}

/* Rules may name a Redis for other faces: whether rightly is not for this program to say. */
tg_status
tg__redis_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error)
{
    (void)uri, (void)rule, (void)error;
    return TG_OK;
}

tg_status
tg__tiered_check_address(const tg_store_uri *uri, const tg_rule *rule, tg_error *error)
{
    (void)uri, (void)rule, (void)error;
    return TG_OK;
}
