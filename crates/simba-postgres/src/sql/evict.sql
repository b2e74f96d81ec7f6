-- Frees the mutex if its holder has the id $2 (null: any) and the token $3 (null: any). Returns the holder, whether it
-- was freed, and whether the row is locked.
WITH holder AS (
    SELECT h.mutex, h.owner, h.token, h.until FROM {mutex} h
    WHERE {synced} AND h.mutex = $1 AND h.until > clock_timestamp() FOR NO KEY UPDATE SKIP LOCKED
), freed AS (
    UPDATE {mutex} m SET {free} FROM holder
    WHERE m.mutex = holder.mutex AND ($2::text IS NULL OR holder.owner = $2)
        AND ($3::bigint IS NULL OR holder.token = $3)
    RETURNING m.mutex
)
SELECT coalesce(holder.owner, m.owner), coalesce(holder.until, m.until), clock_timestamp(),
    EXISTS (SELECT FROM freed), holder.mutex IS NULL
FROM {mutex} m LEFT JOIN holder ON true WHERE m.mutex = $1 AND m.until > clock_timestamp()
