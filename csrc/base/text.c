/* Texts: borrowed bytes with a length. No locale anywhere: a Turkish host must not read other units. */
#include "base/base.h"

#include <stdio.h>

tg_text
tg_text_of(const char *terminated)
{
    return (tg_text){ .data = terminated, .length = terminated ? strlen(terminated) : 0 };
}

static char
lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c + ('a' - 'A')) : c;
}

bool
tg__text_is_nocase(tg_text text, const char *word)
{
    for (size_t i = 0; i < text.length; i++)
        if (word[i] == '\0' || lower(text.data[i]) != lower(word[i]))
            return false;
    return word[text.length] == '\0';
}

tg_text
tg__text_trim(tg_text text)
{
    while (text.length && (text.data[0] == ' ' || text.data[0] == '\t'))
        text.data++, text.length--;
    while (text.length && (text.data[text.length - 1] == ' ' || text.data[text.length - 1] == '\t'))
        text.length--;
    return text;
}

const char *
tg__text_show(tg_text text, char *buffer, size_t size)
{
    const bool cut = text.length > size - 1;
    const size_t kept = cut ? (size > 4 ? size - 4 : 0) : text.length;
    for (size_t i = 0; i < kept; i++)
        buffer[i] = text.data[i] >= 0x20 && text.data[i] < 0x7f ? text.data[i] : '?';
    snprintf(buffer + kept, size - kept, "%s", cut ? "..." : "");
    return buffer;
}

bool
tg__text_number(tg_text text, uint64_t max, uint64_t *number)
{
    uint64_t value = 0;
    if (text.length == 0)
        return false;
    for (size_t i = 0; i < text.length; i++) {
        const unsigned digit = (unsigned char)text.data[i] - (unsigned)'0';
        if (digit > 9 || value > (max - digit) / 10 || digit > max)
            return false;
        value = value * 10 + digit;
    }
    *number = value;
    return true;
}
