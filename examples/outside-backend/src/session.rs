//! One contender: reads the item, decides, and writes it if it has not changed.

use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session, async_trait};
use simba_core::{ContenderId, ErrorKind, FencingToken, Result};
use simba_net::supervise::Supervised;

use crate::connection::{Connection, Reply};
use crate::{CLOCK_ERROR, error};

/// The longest key that memcached accepts, in bytes.
const MAX_KEY: usize = 250;

/// A session without state: the item names the holder.
pub(crate) struct MemcachedSession {
    supervised: Arc<Supervised<Connection>>,
    claim: Claim,
    key: String,
}

/// The item of a held mutex.
struct Hold {
    owner: ContenderId,
    token: FencingToken,
    /// The number of the last write, which a compare-and-set names.
    number: u64,
    remaining: Duration,
}

impl MemcachedSession {
    pub(crate) fn new(supervised: Arc<Supervised<Connection>>, claim: Claim) -> Result<Self> {
        let key = format!("simba:{}", claim.mutex);
        if key.len() > MAX_KEY || key.contains(' ') {
            return Err(error(ErrorKind::Invalid, "memcached has no keys with spaces or above 250 bytes")
                .with_mutex(&claim.mutex));
        }
        Ok(Self { supervised, claim, key })
    }

    /// Reads and writes once. Returns `None` if another write came in between.
    ///
    /// The engine counts the lease from before this call. Both requests go to the same server, in this order, and the
    /// reply to the first shows that the server runs: a server that was paused might write with the time of its pause.
    async fn attempt(&self, connection: &Connection, prior: Prior) -> Result<Option<Answer>> {
        let me = &self.claim.contender;
        match self.read(connection).await? {
            None if self.claim.intent == Intent::Observe => Ok(Some(Answer::Vacant)),
            None => self.write(connection, "ME", None).await,
            // With `Prior::Nothing`, a hold under our own id does not belong to this session.
            Some(hold) if hold.owner != *me || prior == Prior::Nothing => {
                Ok(Some(Answer::Held(hold.ownership())))
            }
            Some(hold) => {
                // A lapsed hold gets a new token, to fence off what is left of the lost tenure.
                let token = (prior != Prior::Lapsed(hold.token)).then_some(hold.token);
                self.write(connection, &format!("C{}", hold.number), token).await
            }
        }
    }

    async fn read(&self, connection: &Connection) -> Result<Option<Hold>> {
        let reply = connection.call(format!("mg {} v c t\r\n", self.key)).await?;
        match reply.status() {
            "EN" => Ok(None),
            "VA" => Hold::parse(&reply, connection).map(Some),
            _ => Err(reply.unexpected()),
        }
    }

    /// Writes the item with the lease from now on, if `condition` holds. Without a token, a new tenure begins.
    async fn write(
        &self,
        connection: &Connection,
        condition: &str,
        token: Option<FencingToken>,
    ) -> Result<Option<Answer>> {
        let (Self { key, .. }, Claim { contender: me, lease, .. }) = (self, &self.claim);
        let value = token.map_or_else(|| me.to_string(), |token| format!("{me} {token}"));
        let granted =
            Duration::from_secs(lease.total().as_secs() + u64::from(lease.total().subsec_nanos() > 0));
        let (size, ttl) = (value.len(), (granted + CLOCK_ERROR).as_secs());
        let reply = connection.call(format!("ms {key} {size} T{ttl} c {condition}\r\n{value}\r\n")).await?;
        match (reply.status(), reply.flag('c')) {
            ("HD", Some(number)) => {
                let token = token.unwrap_or_else(|| connection.token(number));
                Ok(Some(Answer::Ours(Ownership::new(me.clone(), Some(token), granted))))
            }
            ("NS" | "EX" | "NF", _) => Ok(None),
            _ => Err(reply.unexpected()),
        }
    }
}

#[async_trait]
impl Session for MemcachedSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        loop {
            let connection = self.supervised.connection().await?;
            // An attempt fails only if another contender wrote in between. The engine limits the time of the whole call.
            if let Some(answer) = self.attempt(&connection, prior).await? {
                return Ok(answer);
            }
        }
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let connection = self.supervised.connection().await?;
        Ok(self.read(&connection).await?.map(Hold::ownership))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        loop {
            let connection = self.supervised.connection().await?;
            let Some(hold) = self.read(&connection).await? else { return Ok(()) };
            let is_named = match holding {
                Holding::Unknown => true,
                Holding::Under(token) => token == hold.token,
                // Without a queue there is nothing to leave.
                _ => false,
            };
            if !is_named || hold.owner != self.claim.contender {
                return Ok(());
            }
            let reply = connection.call(format!("md {} C{}\r\n", self.key, hold.number)).await?;
            match reply.status() {
                "HD" | "NF" => return Ok(()),
                // A renewal that was sent earlier arrived in between.
                "EX" => {}
                _ => return Err(reply.unexpected()),
            }
        }
    }
}

impl Hold {
    fn parse(reply: &Reply, connection: &Connection) -> Result<Self> {
        let foreign = || error(ErrorKind::Protocol, "the item of this mutex was written by another program");
        let (number, ttl) = reply.flag('c').zip(reply.flag('t')).ok_or_else(foreign)?;
        let mut words = reply.value.split(' ');
        let owner = ContenderId::foreign(words.next().unwrap_or_default())?;
        let token = match words.next() {
            None => connection.token(number),
            Some(token) => FencingToken::new(token.parse().map_err(|_| foreign())?),
        };
        // At least a second, so that waiters do not poll in a loop until the server's clock has reached the end.
        let remaining = Duration::from_secs(ttl).saturating_sub(CLOCK_ERROR).max(Duration::from_secs(1));
        Ok(Self { owner, token, number, remaining })
    }

    fn ownership(self) -> Ownership {
        Ownership::new(self.owner, Some(self.token), self.remaining)
    }
}
