-- Takes the mutex if it is free and no live waiter is before us, and leaves the queue; else tells who has it, as it
-- was before the row could be locked. What is ours has a number of watchers, all else has none.
-- As in take, a free row that got another token while this statement waited for it is not taken.
WITH took AS (
    UPDATE {mutex} m SET
        owner = $2,
        session = $3,
        token = CASE WHEN m.session = $3 AND m.until > clock_timestamp() AND m.token <> $6 THEN m.token
            ELSE greatest(m.token + 1, {micros}) END,
        acquired_at = CASE WHEN m.session = $3 AND m.until > clock_timestamp() AND m.token <> $6
            THEN m.acquired_at ELSE clock_timestamp() END,
        renewed_at = clock_timestamp(),
        ttl_at = clock_timestamp() + make_interval(secs => $4),
        until = clock_timestamp() + make_interval(secs => $5),
        -- Whoever frees it meanwhile sees that the queue changed.
        waited = CASE WHEN m.waited > 0 THEN m.waited + 1 ELSE m.waited - 1 END
    WHERE {bound} {synced} m.mutex = $1 AND (
        (m.session = $3 AND m.until > clock_timestamp())
        OR (m.until <= clock_timestamp() AND m.token = (SELECT s.token FROM {mutex} s WHERE s.mutex = m.mutex)
            AND coalesce((
            SELECT w.session FROM {waiter} w
            WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp() AND (w.session = $3 OR {alive})
            ORDER BY w.place LIMIT 1), $3) = $3))
    RETURNING m.owner, m.session, m.token, m.until, m.watched
), gone AS (
    DELETE FROM {waiter} w USING took WHERE w.mutex = $1 AND w.session = $3
)
SELECT owner, session, token, until, clock_timestamp(), NULL::timestamptz, watched, NULL::text
FROM took
UNION ALL
SELECT m.owner, m.session, m.token, m.until, clock_timestamp(), o.until, NULL::bigint, o.channel
FROM {mutex} m LEFT JOIN {waiter} o ON o.mutex = m.mutex AND o.session = $3
WHERE m.mutex = $1 AND NOT EXISTS (SELECT FROM took)
