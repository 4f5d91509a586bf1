#!/usr/local/bin/tidegate-cgi /usr/lib/cgi-bin/shop.cgi
TIDEGATE_CONFIG=/etc/tidegate/rules.yaml
