"""The global table of an inference service: its groups, and what MindIE-Motor demands of them."""

from rank_tables import findings, service_table

G2 = "server_group_list[2]"


def test_mindie_motor_has_limits_of_size():
    service = service_table()
    coordinators, members = service["server_group_list"][0], service["server_group_list"][2]
    coordinators["server_list"] = [{"server_ip": f"10.1.0.{place + 1}"} for place in range(3)]
    members["server_list"] = [
        {**members["server_list"][0], "server_ip": f"10.3.{place // 250}.{place % 250}"} for place in range(97)
    ]
    found = {(rule, path) for rule, _, path in findings(service)}
    assert {("P22", f"{G2}.server_list"), ("P23", "server_group_list[0].server_list")} <= found
    devices = [{"device_id": str(number), "rank_id": str(number)} for number in range(129)]
    members["server_list"] = [{"server_id": "10.0.2.1", "server_ip": "10.1.2.1", "device": devices}]
    assert ("P21", "error", f"{G2}.server_list[0].device") in findings(service)
