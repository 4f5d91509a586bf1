/* What somebody who misspelt a word probably meant. */
#include "base/words.h"

#include <stdio.h>

enum { WORD_BYTES_MAX = 32 };

static char
lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

static unsigned
least(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

unsigned
tg__word_distance(tg_text a, tg_text b, unsigned most)
{
    unsigned rows[3][WORD_BYTES_MAX + 1]; /* distances between beginnings: two rows back, one back, this one */
    if (a.length > WORD_BYTES_MAX || b.length > WORD_BYTES_MAX)
        return most + 1;
    for (unsigned j = 0; j <= b.length; j++)
        rows[0][j] = rows[1][j] = j;
    for (unsigned i = 1; i <= a.length; i++) {
        unsigned *row = rows[2];
        row[0] = i;
        for (unsigned j = 1; j <= b.length; j++) {
            const char x = lower(a.data[i - 1]), y = lower(b.data[j - 1]);
            row[j] = least(least(rows[1][j] + 1, row[j - 1] + 1), rows[1][j - 1] + (x != y));
            if (i > 1 && j > 1 && x == lower(b.data[j - 2]) && lower(a.data[i - 2]) == y)
                row[j] = least(row[j], rows[0][j - 2] + 1);
        }
        memcpy(rows[0], rows[1], sizeof rows[0]);
        memcpy(rows[1], rows[2], sizeof rows[1]);
    }
    return least(rows[1][b.length], most + 1);
}

const char *
tg__word_nearest(tg_text word, const char *const *known)
{
    const unsigned most = word.length >= 6 ? 2 : 1;
    unsigned best = most + 1;
    const char *nearest = NULL;
    if (word.length < 3)
        return NULL;
    for (; *known; known++) {
        const unsigned distance = tg__word_distance(word, tg_text_of(*known), most);
        if (distance < best) {
            best = distance;
            nearest = *known;
        }
    }
    return nearest;
}

const char *
tg__words_list(const char *const *words, char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = '\0';
    for (size_t i = 0; words[i] && used < size; i++) {
        const int written = snprintf(buffer + used, size - used, "%s%s",
                                     i == 0       ? ""
                                     : words[i + 1] ? ", "
                                                    : " or ",
                                     words[i]);
        used += written > 0 ? (size_t)written : 0;
    }
    return buffer;
}
