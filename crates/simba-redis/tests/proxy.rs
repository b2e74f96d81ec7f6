//! Proxies that spread keys over several servers, or lack features.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;

use common::{Admin, SILENCE, Store, long, resp, soon, until};
use futures_util::future::join_all;
use simba_core::spi::{Answer, Backend as _, Claim, Intent, Prior, Session};
use simba_core::{ContenderId, ErrorKind, MutexName, Simba};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::{Server, Setup};

/// Enough for several batches.
const MANY: usize = 200;

/// Two servers and a twemproxy that spreads keys over them.
struct Spread {
    servers: [Server; 2],
    proxy: Server,
}

impl Spread {
    fn start() -> Self {
        let servers = [(); 2].map(|()| Setup::redis().start().unwrap());
        let addresses: Vec<SocketAddr> = servers.iter().map(Server::address).collect();
        let proxy = Setup::nutcracker(&addresses).start().unwrap();
        Self { servers, proxy }
    }

    /// Starts a proxy with the features that twemproxy lacks and others have: it loads scripts into every server, and
    /// sends commands without a key to the first one. It forwards all other commands to twemproxy.
    fn start_complete_proxy(&self) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (servers, spread) = (self.servers.each_ref().map(Server::address), self.proxy.address());
        // Ends with the process.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || serve(client, servers, spread));
            }
        });
        address
    }
}

fn serve(client: TcpStream, servers: [SocketAddr; 2], spread: SocketAddr) -> Option<()> {
    let mut client = Peer::new(client);
    let mut servers = servers.map(|server| Peer::new(TcpStream::connect(server).unwrap()));
    let mut spread = Peer::new(TcpStream::connect(spread).unwrap());
    loop {
        let (command, raw) = client.message()?;
        match command.as_str() {
            "SCRIPT" => {
                let [first, second] = &mut servers;
                first.call(&raw)?;
                let reply = second.call(&raw)?;
                client.send(&reply)?;
            }
            "INFO" | "TIME" => {
                let reply = servers[0].call(&raw)?;
                client.send(&reply)?;
            }
            // A subscription that receives nothing.
            "SUBSCRIBE" | "UNSUBSCRIBE" => {}
            _ => {
                let reply = spread.call(&raw)?;
                client.send(&reply)?;
            }
        }
    }
}

struct Peer {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    fn send(&mut self, bytes: &[u8]) -> Option<()> {
        self.stream.write_all(bytes).ok()
    }

    fn call(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.send(bytes)?;
        self.message().map(|(_, raw)| raw)
    }

    /// Returns the first word and the bytes of the next command or reply.
    fn message(&mut self) -> Option<(String, Vec<u8>)> {
        loop {
            if let Some((message, length)) = resp::parse(&self.buffer).ok()? {
                let first = message.array().and_then(|args| args.first()?.text()).unwrap_or_default();
                return Some((first.to_owned(), self.buffer.drain(..length).collect()));
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(read) if read > 0 => self.buffer.extend_from_slice(&chunk[..read]),
                _ => return None,
            }
        }
    }
}

async fn backend(address: SocketAddr) -> RedisBackend {
    let config = RedisConfig::from_url(&format!("redis://{address}").parse().unwrap()).unwrap();
    RedisBackend::connect(config.with_timeout(SILENCE)).await.unwrap()
}

fn mutex(n: usize) -> MutexName {
    MutexName::new(format!("spread-{n}")).unwrap()
}

async fn session(backend: &RedisBackend, n: usize) -> Box<dyn Session> {
    let claim = Claim::new(mutex(n), ContenderId::generate(), long()).with_intent(Intent::Try);
    backend.open(claim).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_mutex_has_two_holders_behind_a_proxy_that_spreads_keys() {
    let spread = Spread::start();
    let address = spread.start_complete_proxy();
    let (many, alone) = (backend(address).await, backend(address).await);
    let mut sessions = Vec::new();
    for n in 0..MANY {
        sessions.push(session(&many, n).await);
    }
    // Concurrent calls, which would be batched.
    let answers = join_all(sessions.iter_mut().map(|session| session.contend(Prior::Nothing))).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Answer::Ours(_)))), "they were free");
    let mut held_twice = 0;
    for n in 0..MANY {
        // Sequential calls, which are not batched.
        let answer = session(&alone, n).await.contend(Prior::Nothing).await.unwrap();
        held_twice += usize::from(matches!(answer, Answer::Ours(_)));
    }
    assert_eq!(held_twice, 0, "broken: none of {MANY} mutexes has two holders");
    let mut keys = Admin::at(spread.proxy.address());
    let found = (0..MANY).filter(|n| keys.int(&["EXISTS", &format!("simba:{{spread-{n}}}")]) == 1).count();
    assert_eq!(found, MANY, "broken: every key is on the server that the proxy assigns");
    let simba = Simba::new(many);
    let findings = simba.operate().unwrap().probe().await.unwrap().findings;
    assert!(findings.iter().any(|finding| finding.problem.contains("different servers")), "{findings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_names_a_proxy_without_scripts() {
    let spread = Spread::start();
    let config = RedisConfig::from_url(&spread.proxy.url().parse().unwrap()).unwrap();
    let config = config.with_timeout(SILENCE);
    let error = soon("a connection is refused", RedisBackend::connect(config)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("twemproxy"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_leaves_no_keys() {
    let store = Store::private(Setup::redis());
    let (_backend, mut admin) = (store.backend().await, store.admin());
    until("the probe was executed", || {
        admin.text(&["INFO", "commandstats"]).is_some_and(|stats| stats.contains("cmdstat_eval:calls=1,"))
    })
    .await;
    assert_eq!(admin.int(&["DBSIZE"]), 0);
}

/// Starts a proxy in front of a server that closes the connection at the script of a probe, like a proxy that limits
/// the number of keys per command.
fn start_proxy_that_rejects_the_probe(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    // Ends with the process.
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut client = Peer::new(client);
                let mut server = Peer::new(TcpStream::connect(server).unwrap());
                while let Some((command, raw)) = client.message() {
                    if command == "EVAL" || server.call(&raw).and_then(|reply| client.send(&reply)).is_none()
                    {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxy_that_rejects_the_probe_is_used_without_it() {
    let store = Store::private(Setup::redis());
    let simba = Simba::new(backend(start_proxy_that_rejects_the_probe(store.address)).await);
    let lock = async {
        loop {
            match simba.locker(mutex(0)).try_lock().await {
                Ok(guard) => return guard.unwrap(),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    };
    let guard = soon("a mutex is acquired", lock).await;
    // On the same connection: the proxy closes it at none of these calls.
    for n in 1..20 {
        simba.locker(mutex(n)).try_lock().await.unwrap().unwrap().release().await.unwrap();
    }
    guard.release().await.unwrap();
}
