//! The fabrics of a node: which are open, and why the others are not.

use super::error::NodeError;
use super::offer::FabricRefusal;
use super::plan::ResourcePlan;
use super::rdma::{has_own_rdma_setting, verbs_options};
use super::system_limits::has_rdma_device;
use crate::config::Config;
use crate::fabric::multi::{FabricParts, MultiEndpoint, MultiFabric};
use crate::fabric::shm::{ShmFabric, ShmOptions};
use crate::fabric::tcp::{TcpFabric, TcpOptions};
use crate::fabric::verbs::device::AUTO;
use crate::fabric::verbs::{LinkDevices, VerbsDevice, VerbsFabric};
use crate::fabric::{FabricError, FabricKind, FabricSet, LinkOptions, Registrar};
use crate::memory::Pool;
use crate::wire::HostPort;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The fabric to a peer, and the reason of the choice.
#[derive(Clone, Debug)]
pub(super) struct PeerTransport {
    pub kind: FabricKind,
    pub why: Arc<str>,
    /// The RDMA devices of the link, once there is one.
    pub devices: Option<Arc<LinkDevices>>,
}

impl PeerTransport {
    /// The names of the RDMA devices in use.
    pub fn device_names(&self) -> Vec<String> {
        self.devices.as_ref().map_or_else(Vec::new, |devices| devices.in_use())
    }
}

/// The fabrics of a node that is starting. The RDMA device is open already: it says where the
/// pool's memory should lie.
pub(super) struct OpeningFabrics {
    named: Option<FabricSet>,
    device: Option<VerbsDevice>,
    closed: Vec<(FabricKind, String)>,
}

/// The open fabrics, and the reasons against the others.
pub(super) struct NodeFabrics {
    fabric: MultiFabric,
    /// Why each other fabric is not open.
    closed: Vec<(FabricKind, String)>,
    /// The fabrics that the configuration names.
    named: Option<FabricSet>,
}

fn shm_options(config: &Config, pool: &Pool) -> ShmOptions {
    let max_lent_bytes = config.max_lent_bytes.unwrap_or(pool.region().len() / 2);
    ShmOptions { max_lent_bytes, borrow_grace: config.borrow_grace, ..ShmOptions::default() }
}

/// Links are accepted at the address at which the bootstrap service listens, whose exposure was
/// checked, and nowhere else. Peers are told that address alone, unless `bind` differs from the
/// address in the cluster: then that one leads to it.
///
/// # Errors
/// If the name of this host in the cluster has no address.
fn tcp_options(config: &Config, listener: &TcpListener) -> Result<TcpOptions, FabricError> {
    let unknown = |error: std::io::Error| FabricError::Unavailable {
        fabric: FabricKind::Tcp,
        why: format!("the address of the bootstrap service's socket can't be read: {error}"),
    };
    let listening = listener.local_addr().map_err(unknown)?.ip();
    let mut advertise = vec![listening];
    if config.bind.is_some() {
        let addresses = own_addresses(config)?;
        if !addresses.contains(&listening) {
            advertise = addresses;
        }
    }
    Ok(TcpOptions {
        bind: listening,
        advertise,
        streams: config.tcp_streams,
        busy_poll: config.tcp_busy_poll,
        user_timeout: config.tcp_user_timeout,
        ..TcpOptions::default()
    })
}

/// The addresses of this process in the cluster.
///
/// # Errors
/// If its name has none.
fn own_addresses(config: &Config) -> Result<Vec<IpAddr>, FabricError> {
    let unknown = |why: String| FabricError::Unavailable { fabric: FabricKind::Tcp, why };
    let own = config.cluster.address(config.task_id());
    let own = own.ok_or_else(|| unknown("this process is not in the cluster".into()))?;
    let mut addresses: Vec<IpAddr> = match (own.ip(), own.name()) {
        (Some(ip), _) => vec![ip],
        (None, name) => {
            let name = name.unwrap_or_default();
            let found = (name, own.port()).to_socket_addrs();
            let found = found.map_err(|error| unknown(format!("looking up {name} failed: {error}")))?;
            found.map(|address| address.ip()).collect()
        }
    };
    addresses.dedup();
    addresses.truncate(TCP_ADDRESSES);
    Ok(addresses)
}

/// Addresses of this host that peers try, at most.
const TCP_ADDRESSES: usize = 8;

/// The host of an address, as far as it tells.
pub(super) fn host_of(address: &HostPort) -> (Option<String>, Option<IpAddr>) {
    match address.ip() {
        Some(ip) if ip.is_loopback() => (None, None),
        ip => (address.name().filter(|name| *name != "localhost").map(str::to_owned), ip),
    }
}

/// The peers that verbs and tcp are for: shared memory comes before them on the same host.
pub(super) fn peers_beyond_shm(config: &Config) -> u64 {
    let has_shm = config.fabric.is_none_or(|set| set.has(FabricKind::Shm));
    let same = if has_shm { members_of_host(config) } else { 1 };
    config.cluster.members().count() as u64 - same
}

/// The members at the host of this one, which counts too.
fn members_of_host(config: &Config) -> u64 {
    let own = config.cluster.address(config.task_id()).map(host_of);
    config.cluster.members().filter(|(_, address)| Some(host_of(address)) == own).count() as u64
}

/// Whether a node opens RDMA devices.
pub(super) fn opens_verbs(config: &Config) -> bool {
    config.fabric.map_or_else(|| !is_on_one_host(config), |set| set.has(FabricKind::Verbs))
}

/// Whether the configuration names an RDMA device. `auto` names none: hosts with and without NICs
/// may have the same environment.
fn names_device(config: &Config) -> bool {
    config.rdma_device.as_deref().is_some_and(|names| names.trim() != AUTO)
}

/// Whether an error of the RDMA device is one of the start, though no fabric is named.
fn is_final(config: &Config, error: &FabricError) -> bool {
    let is_of_setting = matches!(error, FabricError::Setting { .. } | FabricError::Option { .. });
    names_device(config) || is_of_setting && has_own_rdma_setting(config)
}

/// Opens the RDMA device, and checks that it has enough for the cluster before anything is made.
///
/// # Errors
/// If it can't be opened. [`NodeError::Limit`] if it has not.
fn open_device(config: &Config) -> Result<VerbsDevice, NodeError> {
    let device = VerbsDevice::open(verbs_options(config))?;
    ResourcePlan::of_device(config, &device).check()?;
    Ok(device)
}

/// Looks whether the RDMA device that the configuration names has enough, before the members meet.
/// A device that can't be opened ends the start later, when the others can be told.
///
/// # Errors
/// [`NodeError::Limit`].
pub(super) fn check_device(config: &Config) -> Result<(), NodeError> {
    match config.fabric {
        Some(set) if set.has(FabricKind::Verbs) => match open_device(config) {
            Err(error @ NodeError::Limit { .. }) => Err(error),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Whether the cluster names one host for all members, as far as their addresses tell.
fn is_on_one_host(config: &Config) -> bool {
    let mut hosts = config.cluster.members().map(|(_, address)| host_of(address));
    let first = hosts.next();
    hosts.all(|host| Some(host) == first)
}

/// Why a node may not use a fabric that its configuration leaves out.
fn not_named(named: FabricSet) -> String {
    format!("fabric is {named}")
}

impl OpeningFabrics {
    /// Opens the RDMA device, if the configuration names verbs, or leaves the choice and there is
    /// one.
    ///
    /// # Errors
    /// If the device can't be opened or has not enough, and the configuration names verbs, a
    /// device, or a setting that the device can't do.
    pub fn begin(config: &Config) -> Result<Self, NodeError> {
        let named = config.fabric;
        let mut closed = Vec::new();
        let device = match named {
            Some(set) if set.has(FabricKind::Verbs) => Some(open_device(config)?),
            Some(set) => {
                closed.push((FabricKind::Verbs, not_named(set)));
                None
            }
            None if is_on_one_host(config) => {
                closed.push((FabricKind::Verbs, "not opened, as all members are on one host".into()));
                None
            }
            None => match open_device(config) {
                Ok(device) => Some(device),
                Err(error) if names_device(config) => return Err(error),
                Err(NodeError::Fabric(error)) if is_final(config, &error) => return Err(error.into()),
                Err(NodeError::Fabric(error)) => {
                    // Without a device nobody expects it.
                    if has_rdma_device() {
                        tracing::warn!("verbs is not used: {error}");
                    }
                    closed.push((FabricKind::Verbs, plain(error)));
                    None
                }
                Err(error) => {
                    tracing::warn!("verbs is not used: {error}");
                    closed.push((FabricKind::Verbs, error.to_string()));
                    None
                }
            },
        };
        Ok(OpeningFabrics { named, device, closed })
    }

    /// The NUMA node of the RDMA device, if one is open.
    pub fn numa_node(&self) -> Option<u32> {
        self.device.as_ref().and_then(|device| device.choice().numa_node)
    }

    /// Opens the fabrics. `listener` is the socket of the bootstrap service.
    ///
    /// # Errors
    /// If one that the configuration names can't be opened, or none can.
    pub fn open(
        self,
        config: &Config,
        pool: &Pool,
        listener: &TcpListener,
    ) -> Result<NodeFabrics, NodeError> {
        let OpeningFabrics { named, device, mut closed } = self;
        let mut parts = FabricParts::default();
        match named.filter(|set| !set.has(FabricKind::Shm)) {
            Some(set) => closed.push((FabricKind::Shm, not_named(set))),
            None => {
                let opened = ShmFabric::new(pool, shm_options(config, pool));
                parts.shm = opened_or_closed(opened, FabricKind::Shm, named.is_some(), &mut closed)?;
            }
        }
        if let Some(device) = device {
            let opened = device.fabric(pool);
            let is_final = opened.as_ref().is_err_and(|error| is_final(config, error));
            let is_named = named.is_some() || is_final;
            parts.verbs = opened_or_closed(opened, FabricKind::Verbs, is_named, &mut closed)?;
        }
        match named.filter(|set| !set.has(FabricKind::Tcp)) {
            Some(set) => closed.push((FabricKind::Tcp, not_named(set))),
            None => {
                let options = tcp_options(config, listener);
                let opened = options.and_then(|options| TcpFabric::new(pool, options));
                parts.tcp = opened_or_closed(opened, FabricKind::Tcp, named.is_some(), &mut closed)?;
            }
        }
        match MultiFabric::new(parts) {
            Some(fabric) => Ok(NodeFabrics { fabric, closed, named }),
            None => {
                let all: Vec<_> = closed.iter().map(|(kind, why)| format!("{kind}: {why}")).collect();
                let why = format!("no fabric can be opened: {}", all.join("; "));
                Err(FabricError::Unavailable { fabric: FabricKind::Shm, why }.into())
            }
        }
    }
}

/// The fabric. One that can't be opened is an error if the configuration names it, else `closed`.
fn opened_or_closed<F>(
    opened: Result<F, FabricError>,
    kind: FabricKind,
    is_named: bool,
    closed: &mut Vec<(FabricKind, String)>,
) -> Result<Option<F>, NodeError> {
    match opened {
        Ok(fabric) => Ok(Some(fabric)),
        Err(error) if is_named => Err(error.into()),
        Err(error) => {
            tracing::warn!("{kind} is not used: {error}");
            closed.push((kind, plain(error)));
            Ok(None)
        }
    }
}

/// The reason of an error, without the name of its fabric.
fn plain(error: FabricError) -> String {
    match error {
        FabricError::Peer { why, .. }
        | FabricError::Unavailable { why, .. }
        | FabricError::Setting { why, .. } => why,
        error => error.to_string(),
    }
}

impl NodeFabrics {
    /// All parts behind one port for each poller.
    pub fn fabric(&self) -> &MultiFabric {
        &self.fabric
    }

    /// Fabrics of these parts, of a node that leaves the choice.
    #[cfg(test)]
    pub fn of(parts: FabricParts) -> NodeFabrics {
        let fabric = MultiFabric::new(parts).expect("a part");
        let closed =
            FabricKind::FASTEST_FIRST.into_iter().filter(|kind| fabric.kinds().all(|it| it != *kind));
        let closed = closed.map(|kind| (kind, "there is none".to_owned())).collect();
        NodeFabrics { fabric, closed, named: None }
    }

    /// Registers memory outside the pool, if one of the fabrics can.
    pub fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        crate::fabric::Fabric::registrar(&self.fabric)
    }

    /// How many rails links have lost so far, without going down.
    pub fn lost_rails(&self) -> Arc<AtomicU64> {
        self.fabric.parts().verbs.as_ref().map_or_else(Arc::default, VerbsFabric::lost_rails)
    }

    /// The fabrics that the configuration names.
    pub fn named(&self) -> Option<FabricSet> {
        self.named
    }

    /// The fabrics that are open, the fastest first.
    pub fn kinds(&self) -> Vec<FabricKind> {
        self.fabric.kinds().collect()
    }

    /// Checks that a fabric is open.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check_open(&self, kind: FabricKind) -> Result<(), FabricRefusal> {
        match self.closed.iter().find(|(closed, _)| *closed == kind) {
            Some((_, why)) => Err(FabricRefusal { why: why.clone(), is_final: true }),
            None => Ok(()),
        }
    }

    /// Checks that the peer behind an address can be linked with over a fabric, as far as the
    /// address tells.
    ///
    /// # Errors
    /// Why it can't.
    pub fn check_peer(&self, kind: FabricKind, address: &[u8]) -> Result<(), FabricRefusal> {
        match (kind, &self.fabric.parts().shm) {
            (FabricKind::Shm, Some(shm)) => {
                shm.check_peer(address).map_err(|error| FabricRefusal { why: plain(error), is_final: true })
            }
            _ => Ok(()),
        }
    }

    /// This side of a link on one of the fabrics, for the poller with number `port`. With the
    /// address of a peer it can accept that peer.
    ///
    /// # Errors
    /// Why there is none.
    pub fn endpoint(
        &self,
        kind: FabricKind,
        port: usize,
        options: &LinkOptions,
        peer: Option<&[u8]>,
    ) -> Result<MultiEndpoint, FabricRefusal> {
        let options = match (kind, &self.fabric.parts().verbs) {
            (FabricKind::Verbs, Some(verbs)) => {
                let depth = verbs.queue_depth();
                LinkOptions { depth, receives: depth, ..options.clone() }
            }
            _ => options.clone(),
        };
        let made = self.fabric.endpoint_on(kind, port, &options).and_then(|mut endpoint| {
            peer.map_or(Ok(()), |peer| endpoint.listen_for(peer))?;
            Ok(endpoint)
        });
        made.map_err(|error| FabricRefusal { why: error.to_string(), is_final: false })
    }
}

/// The queue depth that both sides of a link must have; 0 if they may differ.
pub(super) fn common_depth(kind: FabricKind, options: &LinkOptions) -> u32 {
    match kind {
        FabricKind::Verbs | FabricKind::Tcp => 0,
        _ => options.depth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Listening;
    use crate::fabric::Endpoint;
    use crate::memory::{PagePolicy, PoolOptions, Region, RegionOptions};
    use crate::node::meeting::tests::free_port;
    use std::net::{SocketAddr, TcpStream};
    use std::time::Duration;

    fn config(address: &str, more: &[(&str, &str)]) -> Config {
        let settings = Config::builder().without_environment().member("w", 0);
        let settings = settings.set("cluster", format!("w={address}")).set("fabric", "tcp");
        more.iter().fold(settings, |settings, (key, value)| settings.set(*key, *value)).build().unwrap()
    }

    fn options(address: &str, more: &[(&str, &str)]) -> TcpOptions {
        let config = config(address, more);
        let (me, auth) = (config.task_id(), config.auth_mode());
        let (address, bind) = (config.cluster.address(me).unwrap(), config.bind);
        let listening = Listening { me, address, bind, auth, allow_non_loopback: config.allow_non_loopback };
        tcp_options(&config, &listening.listen().unwrap()).unwrap()
    }

    #[test]
    fn links_are_accepted_where_the_bootstrap_service_listens_and_nowhere_else() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let seen = |options: TcpOptions| (options.bind, options.advertise);
        let port = free_port();
        // Whatever else the name stands for.
        let (bind, advertise) = seen(options(&format!("localhost:{port}"), &[]));
        assert!(bind.is_loopback() && advertise == [bind], "{bind} {advertise:?}");
        let local = format!("127.0.0.1:{port}");
        for (address, bind, expected) in [
            (format!("localhost:{port}"), &*local, ("127.0.0.1", "127.0.0.1")),
            // A rule of the network leads from the one to the other.
            (format!("192.0.2.7:{port}"), &*local, ("127.0.0.1", "192.0.2.7")),
            (local.clone(), "0.0.0.0:0", ("0.0.0.0", "127.0.0.1")),
        ] {
            let more = [("bind", bind), ("allow_non_loopback", "true"), ("auth", "plain")];
            let (bind, advertise) = seen(options(&address, &more));
            assert_eq!((bind, advertise), (ip(expected.0), vec![ip(expected.1)]), "{address}");
        }
    }

    #[test]
    fn the_settings_of_tcp_reach_its_links() {
        let more = [("tcp_streams", "4"), ("tcp_busy_poll", "0s"), ("tcp_user_timeout", "3s")];
        let options = options(&format!("127.0.0.1:{}", free_port()), &more);
        let TcpOptions { streams, busy_poll, user_timeout, .. } = options;
        assert_eq!((streams, busy_poll, user_timeout), (4, Duration::ZERO, Duration::from_secs(3)));
    }

    #[test]
    fn an_endpoint_on_loopback_is_reached_at_its_own_address_alone() {
        let config = config(&format!("127.0.0.1:{}", free_port()), &[]);
        let region = RegionOptions { pages: PagePolicy::Plain, ..RegionOptions::new(1 << 20) };
        let pool = Pool::new(Region::create(0, &region).unwrap(), PoolOptions::default()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fabrics = OpeningFabrics::begin(&config).unwrap().open(&config, &pool, &listener).unwrap();
        let link = LinkOptions { depth: 16, receives: 0, generation: 0 };
        let endpoint = fabrics.endpoint(FabricKind::Tcp, 0, &link, None).unwrap();
        // The port in the endpoint's address.
        let [low, high] = *endpoint.address()[36..].first_chunk().unwrap();
        let reached = |ip: &str| {
            let address = SocketAddr::new(ip.parse().unwrap(), u16::from_le_bytes([low, high]));
            TcpStream::connect(address).is_ok()
        };
        assert!(reached("127.0.0.1") && !reached("127.0.0.2") && !reached("::1"));
    }
}
