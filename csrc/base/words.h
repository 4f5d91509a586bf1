/* Words that people write, and what somebody who misspelt one probably meant.
 * Must not enter: what a word stands for. */
#ifndef TG_WORDS_H
#define TG_WORDS_H

#include "base/base.h"

/* Typing steps between two words, letters in any case: one added, missing, wrong, or two swapped. Over `most`: most +
 * 1. */
unsigned tg__word_distance(tg_text a, tg_text b, unsigned most);
/* The nearest of a NULL-terminated list, NULL when none is near: one step in short words, two from six letters on. */
const char *tg__word_nearest(tg_text word, const char *const *known);
/* "a, b or c" */
const char *tg__words_list(const char *const *words, char *buffer, size_t size);

#endif
