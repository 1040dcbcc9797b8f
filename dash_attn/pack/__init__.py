from enum import IntEnum
class Doc(IntEnum):
    TICKET = 0
    Q_ROW = 1
    K_ROW = 2
    Q_ROWS = 3
    K_ROWS = 4
    Q_TILE = 5
    KV_TILE = 6
    BUNDLE = 7
    BUNDLES = 8
    CONTRIBUTORS = 9
