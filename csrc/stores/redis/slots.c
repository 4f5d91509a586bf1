/* Which of a cluster's 16384 slots a key lies in: CRC-16 (XMODEM) of what stands between the first pair of braces.
 * Must not enter: sockets, who has which slot. */
#include "stores/redis/redis.h"

unsigned
tg__cluster_slot(tg_text hashed)
{
    /* x^16 + x^12 + x^5 + 1, four bits at a step: a table of 32 bytes stays in the cache. */
    static const uint16_t table[16] = { 0x0000, 0x1021, 0x2042, 0x3063, 0x4084, 0x50a5, 0x60c6, 0x70e7,
                                        0x8108, 0x9129, 0xa14a, 0xb16b, 0xc18c, 0xd1ad, 0xe1ce, 0xf1ef };
    uint16_t crc = 0;
    for (size_t i = 0; i < hashed.length; i++) {
        const uint8_t byte = (uint8_t)hashed.data[i];
        crc = (uint16_t)(crc << 4) ^ table[(crc >> 12) ^ (byte >> 4)];
        crc = (uint16_t)(crc << 4) ^ table[(crc >> 12) ^ (byte & 15)];
    }
    return crc % TG__SLOTS;
}
