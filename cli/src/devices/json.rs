//! The report for programs. Unknown values are null. Units are in the names, or else libibverbs's.

use super::{DeviceReport, refused};
use crate::error::CliError;
use serde_json::{Value, json};
use std::net::Ipv6Addr;
use std::path::Path;
use tensorwire::internals::fabric::verbs::device::{
    Choice, Device, DevicePort, GidEntry, Limits, Mtu, Refusal, UserAccess,
};

/// The report, ready to print.
pub fn render(report: &DeviceReport) -> Result<String, CliError> {
    let devices = report.found.devices.iter().zip(&report.files);
    let choices = report.choices.as_ref().ok();
    let value = json!({
        "rdma_subsystem": report.found.subsystem,
        "untold": report.untold,
        "libibverbs": report.library.as_ref().map(|path| path.display().to_string()),
        "devices": devices
            .map(|(device, (file, access))| show_device(device, file.as_deref(), access))
            .collect::<Vec<_>>(),
        "choice": choices.and_then(|of| Choice::nearest(of.rails.iter())).map(show_choice),
        "rails": choices.map(|of| of.rails.iter().map(show_choice).collect::<Vec<_>>()),
        "passed_over": choices.map(|of| of.passed_over.iter().map(Refusal::to_string).collect::<Vec<_>>()),
        "obstacles": report.obstacles(),
    });
    let text = serde_json::to_string_pretty(&value);
    text.map(|text| text + "\n").map_err(|error| CliError::failed("writing JSON", error))
}

fn show_device(device: &Device, file: Option<&Path>, access: &UserAccess) -> Value {
    json!({
        "name": device.name,
        "node_type": device.node_type.to_string(),
        "unusable": device.unusable(),
        "firmware": device.firmware,
        "bus": device.bus,
        "numa_node": device.numa_node,
        "file": file.map(|file| file.display().to_string()),
        "access_refused": refused(&device.name, access),
        "ports": device.ports.iter().map(show_port).collect::<Vec<_>>(),
        "limits": device.limits.as_ref().map(show_limits),
    })
}

fn show_port(port: &DevicePort) -> Value {
    let speed = port.speed.as_ref();
    json!({
        "number": port.number,
        "state": port.state.to_string(),
        "physical_state": port.physical.to_string(),
        "link_layer": port.link.to_string(),
        "speed": speed.map(|speed| json!({
            "megabits_per_second": speed.megabits, "width": speed.width, "generation": speed.generation,
        })),
        "lid": port.lid,
        "active_mtu": port.active_mtu.map(Mtu::bytes),
        "max_mtu": port.max_mtu.map(Mtu::bytes),
        "max_message_bytes": port.max_message,
        "grh_required": port.grh_required,
        "interfaces": port.interfaces.iter().map(|interface| json!({
            "name": interface.name, "mtu": interface.mtu,
        })).collect::<Vec<_>>(),
        "gid_table": port.gid_table,
        "gids": port.gids.iter().map(show_gid).collect::<Vec<_>>(),
        "pkey_table": port.pkey_table,
        "pkeys": port.pkeys.iter().map(|pkey| json!({
            "index": pkey.index, "key": pkey.key,
        })).collect::<Vec<_>>(),
    })
}

fn show_gid(entry: &GidEntry) -> Value {
    json!({
        "index": entry.index,
        "gid": Ipv6Addr::from(entry.gid.0).to_string(),
        "ipv4": entry.gid.ipv4().map(|address| address.to_string()),
        "type": entry.kind.to_string(),
        "interface": entry.interface,
    })
}

fn show_limits(limits: &Limits) -> Value {
    json!({
        "max_qp": limits.max_qp,
        "max_qp_wr": limits.max_qp_wr,
        "max_sge": limits.max_sge,
        "max_cq": limits.max_cq,
        "max_cqe": limits.max_cqe,
        "max_mr": limits.max_mr,
        "max_mr_size": limits.max_mr_size,
        "max_pd": limits.max_pd,
        "max_qp_rd_atom": limits.max_qp_rd_atom,
        "max_qp_init_rd_atom": limits.max_qp_init_rd_atom,
    })
}

fn show_choice(choice: &Choice) -> Value {
    json!({
        "device": choice.device,
        "rail": choice.rail,
        "is_near": choice.is_near,
        "device_reason": choice.device_reason.to_string(),
        "port": choice.port,
        "port_reason": choice.port_reason.to_string(),
        "link_layer": choice.link.to_string(),
        "lid": choice.lid,
        "gid": choice.gid.as_ref().map(show_gid),
        "gid_reason": choice.gid.as_ref().map(|_| choice.gid_reason.to_string()),
        "global_header": choice.global,
        "pkey_index": choice.pkey_index,
        "pkey": choice.pkey,
        "queue_depth": choice.queue_depth,
        "mtu": choice.mtu.map(Mtu::bytes),
    })
}
