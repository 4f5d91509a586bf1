/* JSON for people's tools. */
#include "base/json.h"

#include <inttypes.h>
#include <stdio.h>

static void
put(tg_json *json, const char *text)
{
    json->sink(json->context, tg_text_of(text));
}

static void
put_string(tg_json *json, tg_text value)
{
    put(json, "\"");
    size_t plain = 0;
    for (size_t i = 0; i < value.length; i++) {
        const unsigned char c = (unsigned char)value.data[i];
        if (c >= ' ' && c <= '~' && c != '"' && c != '\\')
            continue;
        char escaped[8];
        if (i > plain)
            json->sink(json->context, (tg_text){ value.data + plain, i - plain });
        snprintf(escaped, sizeof escaped, c == '"' || c == '\\' ? "\\%c" : "\\u%04x", c);
        put(json, escaped);
        plain = i + 1;
    }
    if (value.length > plain)
        json->sink(json->context, (tg_text){ value.data + plain, value.length - plain });
    put(json, "\"");
}

static void
new_line(tg_json *json)
{
    put(json, "\n");
    for (unsigned i = 0; i < json->depth; i++)
        put(json, "  ");
}

static void
begin(tg_json *json, const char *key)
{
    if (json->filled)
        put(json, ",");
    if (json->depth)
        new_line(json);
    if (key) {
        put_string(json, tg_text_of(key));
        put(json, ": ");
    }
    json->filled = true;
}

void
tg__json_open(tg_json *json, const char *key, char bracket)
{
    begin(json, key);
    json->sink(json->context, (tg_text){ &bracket, 1 });
    json->depth++;
    json->filled = false;
}

void
tg__json_close(tg_json *json, char bracket)
{
    json->depth--;
    if (json->filled)
        new_line(json);
    json->sink(json->context, (tg_text){ &bracket, 1 });
    json->filled = true;
    if (json->depth == 0)
        put(json, "\n");
}

void
tg__json_text(tg_json *json, const char *key, tg_text value)
{
    begin(json, key);
    put_string(json, value);
}

void
tg__json_number(tg_json *json, const char *key, uint64_t value)
{
    char digits[24];
    begin(json, key);
    snprintf(digits, sizeof digits, "%" PRIu64, value);
    put(json, digits);
}

void
tg__json_flag(tg_json *json, const char *key, bool value)
{
    begin(json, key);
    put(json, value ? "true" : "false");
}

void
tg__json_null(tg_json *json, const char *key)
{
    begin(json, key);
    put(json, "null");
}

void
tg__json_wait(tg_json *json, const char *key, uint64_t wait_us)
{
    if (wait_us == TG_NEVER)
        tg__json_null(json, key);
    else
        tg__json_number(json, key, wait_us);
}
