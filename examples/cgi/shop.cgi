#!/bin/sh
# What the client asked for, and how long the body was.
printf 'Content-Type: text/plain\r\n\r\n'
echo "shop $REQUEST_METHOD left=$TIDEGATE_REMAINING"
[ "${CONTENT_LENGTH:-0}" = 0 ] || sha256sum
