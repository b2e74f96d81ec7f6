//! Peer that behaves like JVM Simba: the same keys, events, script logic and flaws.
//!
//! It counts its lease from the receipt of a reply, renews when its ttl is over, releases before its work has ended,
//! wakes one waiter even if that is dead, acquires a free mutex regardless of waiters, queues by whole seconds, and
//! does not remove its queue entry when it acquires.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use simba_core::MutexName;

use super::Admin;
use super::resp::Reply;

const ACQUIRE: &str = "
local key, id, lease = 'simba:' .. KEYS[1], ARGV[1], ARGV[2]
if redis.call('set', key, id, 'nx', 'px', lease) then
  redis.call('publish', key, 'acquired@@' .. id)
  return id .. '@@' .. lease
end
redis.call('zadd', key .. ':contender', 'nx', redis.call('time')[1], id)
return redis.call('get', key) .. '@@' .. redis.call('pttl', key)";

const GUARD: &str = "
local key, id, lease = 'simba:' .. KEYS[1], ARGV[1], ARGV[2]
local owner = redis.call('get', key)
if owner == id and redis.call('set', key, id, 'xx', 'px', lease) then return id .. '@@' .. lease end
if not owner then return '@@' end
return owner .. '@@' .. redis.call('pttl', key)";

const RELEASE: &str = "
local key, id = 'simba:' .. KEYS[1], ARGV[1]
local queue = key .. ':contender'
if redis.call('get', key) ~= id then
  redis.call('zrem', queue, id)
  return 0
end
redis.call('del', key)
local next = redis.call('zrevrange', queue, -1, -1)[1]
if next then
  redis.call('zrem', queue, next)
  redis.call('publish', key .. ':' .. next, 'released@@' .. id)
end
return 1";

pub struct Peer {
    commands: Admin,
    events: Receiver<String>,
    tag: String,
    id: String,
    ttl: Duration,
    transition: Duration,
}

/// An interval in which the peer validly held the mutex.
pub struct Hold {
    pub from: Instant,
    /// End of the key's lease, counted from before the request.
    pub until: Instant,
}

impl Peer {
    pub fn start(
        address: SocketAddr,
        mutex: &MutexName,
        id: &str,
        ttl: Duration,
        transition: Duration,
    ) -> Self {
        let (tag, mut subscriber) = (format!("{{{mutex}}}"), Admin::at(address));
        subscriber.send(&["SUBSCRIBE", &format!("simba:{tag}"), &format!("simba:{tag}:{id}")]);
        subscriber.reply();
        subscriber.reply();
        let (sender, events) = channel();
        // Ends with the connection, or when the receiver is dropped.
        thread::spawn(move || {
            while let Some(reply) = subscriber.try_reply() {
                let event = reply.array().and_then(|parts| parts[2].text().map(String::from));
                if event.is_some_and(|event| sender.send(event).is_err()) {
                    return;
                }
            }
        });
        Self { commands: Admin::at(address), events, tag, id: id.into(), ttl, transition }
    }

    fn lease(&self) -> String {
        (self.ttl + self.transition).as_millis().to_string()
    }

    /// Runs a script. Returns the owner and the milliseconds left, split as JVM Simba does.
    fn eval(&mut self, script: &str) -> (String, u64) {
        let lease = self.lease();
        let reply = match self.commands.call(&["EVAL", script, "1", &self.tag, &self.id, &lease]) {
            Reply::Bulk(text) => String::from_utf8(text).expect("text"),
            // After any error it sleeps for a ttl.
            _ => return (String::new(), self.ttl.as_millis() as u64),
        };
        let parts: Vec<&str> = reply.split("@@").collect();
        assert_eq!(parts.len(), 2, "a JVM peer cannot parse `{reply}`");
        (parts[0].into(), parts[1].parse().unwrap_or(0))
    }

    /// Waits until it holds the mutex, or until `end`.
    pub fn acquire(&mut self, end: Instant) -> Option<Hold> {
        while Instant::now() < end {
            let sent = Instant::now();
            let (owner, left) = self.eval(ACQUIRE);
            if owner == self.id {
                let left = Duration::from_millis(left);
                return Some(Hold { from: Instant::now(), until: sent + left });
            }
            let jitter = fastrand::u64(0..1200);
            let pause = Duration::from_millis((left + jitter).saturating_sub(200));
            self.sleep(pause.min(end.saturating_duration_since(Instant::now())));
        }
        None
    }

    /// Sleeps for `pause`, or until it receives a release event.
    fn sleep(&self, pause: Duration) {
        let until = Instant::now() + pause;
        loop {
            match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(event) if event.starts_with("released@@") => return,
                Ok(event) => assert_eq!(event.split("@@").count(), 2, "a JVM peer cannot parse `{event}`"),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Holds the mutex for `length` and renews when the ttl is over. Returns false if it lost the mutex.
    pub fn work(&mut self, hold: &mut Hold, length: Duration) -> bool {
        let end = Instant::now() + length;
        let mut renew = hold.from + self.ttl;
        while Instant::now() < end {
            let until = end.min(renew);
            thread::sleep(until.saturating_duration_since(Instant::now()));
            if Instant::now() >= renew {
                let sent = Instant::now();
                if self.eval(GUARD).0 != self.id {
                    return false;
                }
                renew = Instant::now() + self.ttl;
                hold.until = sent + self.ttl + self.transition;
            }
        }
        true
    }

    /// Releases the mutex, and ends its work only then.
    pub fn release(&mut self) {
        self.eval(RELEASE);
        thread::sleep(Duration::from_millis(fastrand::u64(0..5)));
    }
}
