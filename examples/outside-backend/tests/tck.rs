//! The public conformance suite on a memcached server that every test starts for itself.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use outside_backend::MemcachedBackend;
use simba_core::spi::ConnectUrl;
use simba_core::{Clock, ErrorKind, Lease, Loss, Simba, SystemClock};
use simba_tck::{Connection, FaultProxy, Fixture, Profile, async_trait, cases};

/// The settings that the backend requires.
const REQUIRED: [&str; 4] = ["-M", "-F", "-o", "no_slab_reassign"];

/// A server that is killed when this is dropped.
struct Server {
    address: SocketAddr,
    options: &'static [&'static str],
    process: Child,
}

impl Server {
    fn start(options: &'static [&'static str]) -> Self {
        loop {
            // Another process may get the port first.
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let address = listener.local_addr().unwrap();
            drop(listener);
            if let Some(process) = spawn(address, options) {
                return Self { address, options, process };
            }
        }
    }

    fn restart(&mut self) {
        self.kill();
        self.process = spawn(self.address, self.options).expect("the server starts again");
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a server and waits until it answers. Returns `None` if it ended.
fn spawn(address: SocketAddr, options: &[&str]) -> Option<Child> {
    let mut command = Command::new("memcached");
    command.args(["-u", "nobody", "-l", "127.0.0.1", "-t", "1", "-m", "16"]);
    command.args(["-p", &address.port().to_string()]).args(options);
    let mut process = command.spawn().expect("install memcached: apt-get install memcached");
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        if process.try_wait().unwrap().is_some() {
            return None;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "memcached does not answer");
        thread::sleep(Duration::from_millis(10));
    }
    Some(process)
}

fn url(address: SocketAddr, longest_lease: &str) -> ConnectUrl {
    format!("memcached://{address}?longest_lease={longest_lease}").parse().unwrap()
}

/// Connects as soon as the server has run for the longest lease.
async fn connect(address: SocketAddr, longest_lease: &str) -> MemcachedBackend {
    loop {
        match MemcachedBackend::connect(&url(address, longest_lease), SystemClock).await {
            Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(50)).await,
            connected => return connected.unwrap(),
        }
    }
}

struct Memcached {
    server: Mutex<Server>,
    longest_lease: &'static str,
}

impl Memcached {
    fn start(longest_lease: &'static str) -> Self {
        Self { server: Mutex::new(Server::start(&REQUIRED)), longest_lease }
    }

    fn address(&self) -> SocketAddr {
        self.server.lock().unwrap().address
    }
}

#[async_trait]
impl Fixture for Memcached {
    async fn connect(&self) -> Connection {
        let proxy = FaultProxy::start(self.address()).await.unwrap();
        let backend = connect(proxy.address(), self.longest_lease).await;
        Connection::new(backend, Arc::new(proxy))
    }

    fn profile(&self) -> Profile {
        // It has no notifications and no queue, and keeps items in memory only.
        Profile::default().with_push(false).with_fifo(false).with_survives_restart(false)
    }

    async fn restart(&self) -> bool {
        self.server.lock().unwrap().restart();
        true
    }
}

// Without a longest lease: some cases use long leases, and would wait for as long at their start.
simba_tck::suite!(Memcached::start("0s"));

const LONGEST_LEASE: &str = "8s";

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_is_survived_with_a_longest_lease() {
    cases::faults::a_restart_of_the_store_is_survived(&Memcached::start(LONGEST_LEASE)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_none_acquires_before_the_deadline_of_the_last_holder() {
    let fixture = Memcached::start(LONGEST_LEASE);
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(4)).unwrap();
    let connect = async || Simba::new(connect(fixture.address(), LONGEST_LEASE).await).with_lease(lease);
    let (one, two) = (connect().await, connect().await);
    let guard = one.locker("orders").lock().await.unwrap();
    fixture.restart().await;
    let next = two.locker("orders").with_patience(Duration::from_secs(60)).lock().await.unwrap();
    let acquired = SystemClock.now();
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline));
    assert!(acquired >= guard.deadline(), "acquired at {acquired:?}, before {:?}", guard.deadline());
    assert!(next.token() > guard.token(), "{} comes after {}", next.token(), guard.token());
}

#[tokio::test]
async fn a_lease_above_the_longest_is_refused() {
    let fixture = Memcached::start("1s");
    let simba = Simba::new(connect(fixture.address(), "1s").await);
    let error = simba.locker("orders").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("longest_lease"), "{error}");
}

#[tokio::test]
async fn a_server_that_may_forget_mutexes_is_refused_with_the_option_to_set() {
    for (options, missing) in [
        (&["-F", "-o", "no_slab_reassign"][..], "with -M"),
        (&["-M", "-o", "no_slab_reassign"], "with -F"),
        (&["-M", "-F"], "with -o no_slab_reassign"),
        (&["-M", "-F", "-C", "-o", "no_slab_reassign"], "without -C"),
    ] {
        let server = Server::start(options);
        let error = MemcachedBackend::connect(&url(server.address, "0s"), SystemClock).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(missing), "{error}");
    }
}

#[tokio::test]
async fn a_url_names_one_server_and_known_settings() {
    for url in ["memcached://a,b", "memcached:", "memcached://a?longest=1s", "memcached://a?longest_lease=x"]
    {
        let refused = MemcachedBackend::connect(&url.parse().unwrap(), SystemClock).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid, "{url}");
    }
}
