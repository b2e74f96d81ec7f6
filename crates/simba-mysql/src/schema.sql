CREATE TABLE IF NOT EXISTS `simba_mutex` (
    mutex         VARCHAR(66)     NOT NULL PRIMARY KEY COMMENT 'mutex name',
    acquired_at   BIGINT UNSIGNED NOT NULL,
    ttl_at        BIGINT UNSIGNED NOT NULL,
    transition_at BIGINT UNSIGNED NOT NULL,
    owner_id      VARCHAR(128)    NOT NULL,
    version       INT UNSIGNED    NOT NULL
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4
